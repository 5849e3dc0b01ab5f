"""What benchmarks share: a parser whose help shows the first lines of a program as they are."""

import argparse


def option_parser(text: str | None) -> argparse.ArgumentParser:
    "A parser for a program with this docstring"
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
