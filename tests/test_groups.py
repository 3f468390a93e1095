"""Replica groups in every notation, and the mesh axes that they mean."""

import pytest

from jaxshard.xla.groups import Span, group_text, parse_groups, span, span_of_groups, span_of_pairs

MESH = {"replica": 1, "stage": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,1,2},{3}}", ((0, 1, 2), (3,))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=2,'b'=1,'c'=4] {'a','b','c'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("@mesh<a=2,b=4> {b}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'x'}", ((3, 0), (1, 2))),
    ],
)
def test_notations(text, groups):
    """Sub-axes and device_ids as in openxla/xla, xla/hlo/ir/replica_group_test.cc."""
    assert parse_groups(text, 8) == groups


def test_unknown_notation_is_an_error():
    with pytest.raises(ValueError, match="notation"):
        parse_groups("<8>", 8)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add", Span(("model",), 2)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", Span(("data",), 2)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", Span(("stage",), 2)),
        ("replica_groups=[2,4]<=[8], dimensions={0}", Span(("data", "model"), 4)),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", Span(("stage", "data", "model"), 8)),
        ("replica_groups={}, to_apply=%add", Span(("stage", "data", "model"), 8)),
        ("to_apply=%add", Span(("stage", "data", "model"), 8)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={1}", Span(("stage", "data"), 4)),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", Span((), 1)),
        ("source_target_pairs={{0,4},{1,5},{2,6},{3,7}}", Span(("stage",), 2, shift=1)),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}, metadata={}", Span(("model",), 2, shift=1)),
        ("source_target_pairs={{0,0},{1,1}}", Span((), 1)),
        ("source_target_pairs={{0,3},{3,0}}", Span(("data", "model"), 4)),
    ],
)
def test_axes(attributes, expected):
    assert span(attributes, MESH) == expected


@pytest.mark.parametrize(
    ("pairs", "shift"),
    [
        (((0, 1), (1, 2), (2, 3), (3, 0)), 1),
        (((0, 1), (1, 2), (2, 3)), 1),
        (((1, 0), (2, 1), (3, 2), (0, 3)), -1),
        (((0, 2), (1, 3), (2, 0), (3, 1)), 2),
        (((0, 1), (1, 3)), None),
    ],
)
def test_direction_of_a_permute(pairs, shift):
    assert span_of_pairs(pairs, {"data": 1, "model": 4}) == Span(("model",), 4, shift=shift)


def test_text_is_found_whole():
    attributes = "channel_id=6, replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, dimensions={0}"
    assert group_text(attributes) == ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", False)


def test_part_of_an_axis_is_said():
    assert span_of_groups(((0, 1), (2, 3)), {"data": 4}) == Span(("data",), 2, "parts of data: 2 of its 4")


def test_irregular_groups_are_said():
    found = span_of_groups(((0, 1, 2), (3,)), {"data": 2, "model": 2})
    assert found.axes == ("data", "model")
    assert "groups of 1 and 3" in found.note


def test_a_mesh_that_is_too_small_is_said():
    assert "beyond the mesh of 4" in span_of_groups(((0, 7),), {"data": 4}).note
    assert "beyond the mesh of 4" in span_of_pairs(((0, 7),), {"data": 4}).note
