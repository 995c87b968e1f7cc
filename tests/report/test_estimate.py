"""The verdict is what people act on, so each thing it can say is held to numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from narrowband.report.estimate import Row, estimated_step, estimates, verdict, worth_it_below

COMPUTE_S = 0.1
DENSE = Row("none", baseline=True, sent_bytes=20e6, codec_s=0.0, heldout_loss=2.0)
HALF = Row("fp16", baseline=True, sent_bytes=10e6, codec_s=0.001, heldout_loss=2.0)
SPARSE = Row("topk:density=0.01+ef", baseline=False, sent_bytes=0.5e6, codec_s=0.02, heldout_loss=2.02)
QUANTIZED = Row("qsgd:bits=4", baseline=False, sent_bytes=2.5e6, codec_s=0.004, heldout_loss=2.0)
BROKEN = Row("sign", baseline=False, sent_bytes=0.6e6, codec_s=0.002, heldout_loss=2.5)


def test_the_estimate_is_the_formula():
    # 0.1 s compute, 20 ms codec, 0.5 MB at 100 Mbit/s = 40 ms
    assert estimated_step(SPARSE, COMPUTE_S, 100e6) == pytest.approx(0.16)


def test_estimates_name_every_codec_on_every_link():
    entries = estimates([DENSE, SPARSE], COMPUTE_S, (1e8, 1e9))
    assert {(e["codec"], e["rate_bits_per_s"]) for e in entries} == {
        (row.codec, rate) for row in (DENSE, SPARSE) for rate in (1e8, 1e9)
    }


def test_a_codec_that_pays_on_slow_links_only():
    said = verdict([DENSE, HALF, SPARSE], COMPUTE_S, (100e6, 10e9))
    assert "topk:density=0.01+ef sends 40 times less than fp32" in said
    assert "2.020 against 2.000 (+1.0%)" in said
    # fp16 at 100 Mbit/s: 0.1 + 0.001 + 0.8 s; top-k: 0.16 s
    assert "At 100 Mbit/s it would be 5.6 times as fast: topk:density=0.01+ef would take 160 ms" in said
    assert "901 ms with fp16 (estimate)" in said
    # at 10 Gbit/s: 0.109 s against 0.1204 s
    assert "At 10 Gbit/s compression is not worth it on this link" in said


def test_each_link_gets_the_codec_that_is_fastest_there():
    said = verdict([DENSE, HALF, SPARSE, QUANTIZED], COMPUTE_S, (100e6, 1e9))
    assert "At 100 Mbit/s it would be 5.6 times as fast: topk:density=0.01+ef" in said
    # 1 Gbit/s: top-k 0.1 + 0.02 + 0.004, qsgd 0.1 + 0.004 + 0.02, fp16 0.1 + 0.001 + 0.08
    assert "At 1 Gbit/s it would be 1.5 times as fast" in said


def test_a_codec_that_costs_too_much_loss_is_named_and_not_recommended():
    said = verdict([DENSE, HALF, SPARSE, BROKEN], COMPUTE_S)
    assert "More than 2% above the uncompressed loss after this many steps: sign (+25.00%)" in said
    assert "sign would take" not in said


def test_when_nothing_keeps_the_loss_the_answer_is_no():
    said = verdict([DENSE, HALF, BROKEN], COMPUTE_S)
    assert said.startswith("Do not compress here")
    assert "sign, ended at 2.500 (+25.00%)" in said


def test_a_run_that_diverged_is_never_the_choice():
    diverged = replace(SPARSE, heldout_loss=math.inf)
    assert "topk:density=0.01+ef (diverged)" in verdict([DENSE, HALF, diverged, QUANTIZED], COMPUTE_S)
    assert "the closest, topk:density=0.01+ef, diverged" in verdict([DENSE, HALF, diverged], COMPUTE_S)
    assert verdict([DENSE, HALF, diverged, QUANTIZED], COMPUTE_S).startswith("qsgd:bits=4 sends 8 times less")


def test_sixteen_bits_that_diverged_have_not_to_be_beaten():
    rows = [DENSE, replace(HALF, heldout_loss=math.inf), QUANTIZED]
    said = verdict(rows, COMPUTE_S, (100e6,))
    # 0.1 + 0.004 + 0.2 s against 0.1 + 1.6 s
    assert (
        "At 100 Mbit/s it would be 5.6 times as fast: qsgd:bits=4 would take 304 ms per step against 1.7 s with none"
        in said
    )
    assert worth_it_below(rows, COMPUTE_S) == worth_it_below([DENSE, QUANTIZED], COMPUTE_S)


def test_a_dense_run_that_diverged_says_nothing_about_codecs():
    assert "lower learning rate" in verdict([replace(DENSE, heldout_loss=math.inf), SPARSE], COMPUTE_S)


def test_one_rank_has_nothing_to_compress():
    alone = [replace(row, sent_bytes=0) for row in (DENSE, SPARSE)]
    for rows in (alone, alone[:1]):
        said = verdict(rows, COMPUTE_S)
        assert "One rank sends nothing" in said
        assert "narrowband demo --nodes 4" in said
        assert "nan" not in said


def test_it_says_what_depends_on_this_machine_and_where_the_answer_flips():
    said = verdict([DENSE, HALF, SPARSE], COMPUTE_S)
    assert "This one computes a step in 100 ms (measured, with nothing sent)" in said
    # against fp16, 5 % of whose step are to be saved: 8 · (0.95 · 10 MB − 0.5 MB) over 0.12 s − 0.95 · 0.101 s
    rate = 8 * 9e6 / (0.12 - 0.95 * 0.101)
    assert worth_it_below([DENSE, HALF, SPARSE], COMPUTE_S) == pytest.approx(rate)
    assert "The answer flips at about 2.99 Gbit/s (estimate)" in said
    for link, worth in ((0.999 * rate, True), (1.001 * rate, False)):
        before = min(estimated_step(row, COMPUTE_S, link) for row in (DENSE, HALF))
        assert (estimated_step(SPARSE, COMPUTE_S, link) <= 0.95 * before) == worth


def test_the_answer_need_not_flip():
    free = replace(SPARSE, codec_s=-0.05)  # as if it spared computation
    assert worth_it_below([DENSE, HALF, free], COMPUTE_S) == math.inf
    assert "on every link" in verdict([DENSE, HALF, free], COMPUTE_S)
    heavy = replace(SPARSE, sent_bytes=10e6)
    assert worth_it_below([DENSE, HALF, heavy], COMPUTE_S) is None
    assert "not save 5% of a step on any link" in verdict([DENSE, HALF, heavy], COMPUTE_S)
    assert worth_it_below([DENSE, HALF, BROKEN], COMPUTE_S) is None  # its loss is too high


def test_only_baselines():
    assert "nothing to judge" in verdict([DENSE, HALF], COMPUTE_S)


@pytest.mark.parametrize("rows", [[], [SPARSE, DENSE]])
def test_a_verdict_needs_the_dense_run_first(rows):
    with pytest.raises(ValueError, match="uncompressed baseline"):
        verdict(rows, COMPUTE_S)
