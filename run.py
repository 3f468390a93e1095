"""`python run.py --mesh dp=4,tp=2`: the program from a checkout; the installed script `jaxshard` is the same."""

from jaxshard.__main__ import main

if __name__ == "__main__":
    main()
