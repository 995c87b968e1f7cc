"""Run the compositions of any seeds: ``python -m tests.compositions --seeds 100 200``.

What breaks is printed with its composition in one line, which ``python -m tests.compositions --line '…'`` runs again,
also after options were taken out of it by hand.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby

from tests.compositions.drawing import PLACES, Composition, draw
from tests.compositions.invariants import check_all
from tests.ranks import RankError, run_ranks

#: Compositions that one call of the ranks runs.
_TOGETHER = 12


def outcomes_of(compositions):
    """Each composition with what is wrong with it, or "" if nothing is."""
    by_size = sorted(compositions, key=lambda c: c["size"])
    for size, several in groupby(by_size, key=lambda c: c["size"]):
        chosen = list(several)
        for begin in range(0, len(chosen), _TOGETHER):
            yield from _together(chosen[begin : begin + _TOGETHER], size)


def _together(compositions, size):
    try:
        ranks = run_ranks(
            check_all, size, [str(c) for c in compositions], timeout_s=20.0 + 5.0 * len(compositions), grace_s=2.0
        )
    except RankError as error:
        if len(compositions) == 1:
            yield compositions[0], str(error)
            return
        for each in compositions:  # one by one, to find out which it was
            yield from _together([each], size)
        return
    for each, found in zip(compositions, zip(*ranks, strict=True), strict=True):
        problems = dict.fromkeys(text for text in found if text)
        yield each, "\n".join(problems)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("A", "B"), default=(0, 100), help="from A to B - 1")
    parser.add_argument("--place", choices=PLACES, help="only compositions of this place")
    parser.add_argument("--line", help="a composition, instead of those of seeds")
    options = parser.parse_args()
    if options.line:
        compositions = [Composition.parse(options.line)]
    else:
        compositions = [draw(seed, options.place) for seed in range(*options.seeds)]
    broken = 0
    for c, problem in outcomes_of(compositions):
        broken += bool(problem)
        print(f"{'BROKEN' if problem else 'holds'}  {c}{problem and chr(10) + problem}", flush=True)
    print(f"{broken} of {len(compositions)} are broken" if broken else f"all {len(compositions)} hold")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
