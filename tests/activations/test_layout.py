"""A tensor's order in memory, and its groups."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.activations.layout import Arrangement, Grouping
from tests.activations.tensors import some_tensor


@given(x=some_tensor())
def test_flat_is_the_order_of_memory_and_unflat_its_inverse(x):
    arrangement = Arrangement.of(x)
    flat = arrangement.flat(x)
    assert flat.tolist() == sorted(x.flatten().tolist())  # they were numbered in memory order
    back = arrangement.unflat(flat)
    assert torch.equal(back, x)
    assert flat.is_contiguous()
    assert arrangement.without_gaps == (flat.data_ptr() == x.data_ptr())
    if arrangement.without_gaps:
        assert all(a == b for a, b, size in zip(back.stride(), x.stride(), x.shape, strict=True) if size > 1)


@given(x=some_tensor(), data=st.data())
def test_every_element_is_in_the_row_of_its_group(x, data):
    """Rows name for every element of memory the group that its place in the dimension says."""
    dim = data.draw(st.integers(0, x.dim() - 1))
    size = x.shape[dim]
    groups = data.draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))
    major = data.draw(st.sampled_from([m for m in range(1, size // groups + 1) if size // groups % m == 0]))
    arrangement = Arrangement.of(x)
    rows = arrangement.rows(Grouping(dim, groups, major))
    assert rows.numel == x.numel()
    assert (rows.parts, rows.groups) == (1, groups)
    group = (torch.arange(size) // (size // groups // major)) % groups
    shape = [1] * x.dim()
    shape[dim] = size
    expected = group.view(shape).expand(x.shape)
    found = torch.arange(groups).view(1, 1, groups, 1).expand(rows.parts, rows.outer, groups, rows.inner)
    assert torch.equal(arrangement.unflat(found.reshape(-1)), expected)


@given(x=some_tensor(min_dim=2), data=st.data())
def test_samples_are_parts_where_they_lie_outermost(x, data):
    dim = data.draw(st.integers(1, x.dim() - 1))
    samples = data.draw(st.sampled_from([s for s in range(1, x.shape[0] + 1) if x.shape[0] % s == 0]))
    arrangement = Arrangement.of(x)
    rows = arrangement.rows(Grouping(dim, x.shape[dim]), samples=samples)
    assume(arrangement.order[0] == 0)
    assert (rows.parts, rows.groups, rows.numel) == (samples, x.shape[dim], x.numel())
    found = torch.arange(samples).view(-1, 1).expand(samples, x.numel() // samples).reshape(-1)
    of_first = torch.arange(x.shape[0]) // (x.shape[0] // samples)
    assert torch.equal(arrangement.unflat(found), of_first.view(-1, *[1] * (x.dim() - 1)).expand(x.shape))


def test_samples_that_lie_further_in_share_their_ranges():
    x = torch.zeros(5, 4, 6).transpose(0, 1)  # (B, N, C), and N is outermost
    assert Arrangement.of(x).rows(Grouping(2, 3), samples=4) == kernels.Rows(1, 20, 3, 2)
    assert Arrangement.of(x.contiguous()).rows(Grouping(2, 3), samples=4) == kernels.Rows(4, 5, 3, 2)


@given(x=some_tensor(), data=st.data())
def test_lines_are_the_order_of_memory_with_gaps_at_most_between_them(x, data):
    dim = data.draw(st.integers(0, x.dim() - 1))
    groups = data.draw(st.sampled_from([g for g in range(1, x.shape[dim] + 1) if x.shape[dim] % g == 0]))
    arrangement = Arrangement.of(x)
    rows = arrangement.rows(Grouping(dim, groups))
    lines = arrangement.lines(x, rows)
    assert torch.equal(lines.reshape(-1), arrangement.flat(x))
    assert lines.is_contiguous() or (lines.shape == (rows.parts * rows.outer, rows.groups * rows.inner))
    assert lines.is_contiguous() or lines.stride(1) == 1


def test_queries_keys_and_values_of_one_product_are_read_where_they_are():
    product = torch.randn(4, 7, 3, 2, 8)  # (B, N, 3, H, D)
    for x in product.permute(2, 0, 3, 1, 4).unbind():  # (B, H, N, D)
        arrangement = Arrangement.of(x)
        for samples in (1, 4):
            rows = arrangement.rows(Grouping(1, 2), samples=samples)
            lines = arrangement.lines(x, rows)
            assert (lines.data_ptr(), lines.shape, lines.stride()) == (x.data_ptr(), (28, 16), (48, 1))
