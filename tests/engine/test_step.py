import numpy as np
import torch

from edge.engine.scheduler import Chunk, Sequence
from edge.engine.step import build_step

CPU = torch.device("cpu")


def sequence(tokens: list[int], num_computed: int, pages: list[int], draft: list[int] | None = None) -> Sequence:
    return Sequence(0, tokens, len(tokens), 1, num_computed_tokens=num_computed, pages=pages, draft=draft or [])


def test_a_step_of_a_decode_and_a_prefill_chunk() -> None:
    decode = sequence([1, 2, 3, 4, 5, 6], 5, [7, 2])
    prefill = sequence([10, 11, 12, 13, 14, 15, 16, 17], 2, [3, 9, 5])
    step = build_step([Chunk(decode, 1), Chunk(prefill, 4)], 4, CPU)
    assert step.tokens.tolist() == [6, 12, 13, 14, 15]
    assert step.positions.tolist() == [5, 2, 3, 4, 5]
    assert step.slots.tolist() == [2 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 9 * 4, 9 * 4 + 1]
    assert step.starts.tolist() == [0, 1, 5]
    assert step.lengths.tolist() == [6, 6]
    assert step.page_table.tolist() == [[7, 2], [3, 9]]
    assert (step.num_tokens, step.num_sequences, step.adapters) == (5, 2, None)


def test_rows_of_shorter_sequences_end_in_zeros() -> None:
    chunks = [Chunk(sequence([1] * 9, 8, [6, 5, 4]), 1), Chunk(sequence([1], 0, [3]), 1)]
    assert build_step(chunks, 4, CPU).page_table.tolist() == [[6, 5, 4], [3, 0, 0]]


def test_the_tokens_of_a_draft_come_after_those_of_the_sequence() -> None:
    drafted = sequence([1, 2, 3], 2, [1, 0], draft=[8, 9, 10])
    step = build_step([Chunk(drafted, 3, 2)], 4, CPU)
    assert step.tokens.tolist() == [3, 8, 9]
    assert step.positions.tolist() == [2, 3, 4]
    assert step.lengths.tolist() == [5]


def test_types_are_what_kernels_read() -> None:
    step = build_step([Chunk(sequence([1, 2], 0, [0]), 2)], 4, CPU)
    for tensor in (step.tokens, step.positions, step.slots):
        assert tensor.dtype is torch.int64
    for tensor in (step.starts, step.lengths, step.page_table):
        assert tensor.dtype is torch.int32
        assert tensor.is_contiguous()
    assert step.host_lengths.dtype == np.int32


def test_groups_hold_alike_neighbours() -> None:
    lengths = [5, 7, 400, 6]
    decodes = [Chunk(sequence([1] * n, n - 1, list(range(100))), 1) for n in lengths]
    prefill = Chunk(sequence([1] * 10, 0, [50, 51, 52]), 10)
    groups = build_step([*decodes, prefill], 4, CPU).groups
    assert [(group.start, group.num_queries, len(group.pages)) for group in groups] == [
        (0, 1, 2),
        (2, 1, 1),
        (3, 1, 1),
        (4, 10, 1),
    ]
    assert groups[0].positions.tolist() == [[4], [6]]
    assert groups[0].pages.tolist() == [[0, 1], [0, 1]]
    assert groups[3].positions.tolist() == [list(range(10))]


def test_a_group_pads_with_pages_of_the_same_sequence() -> None:
    chunks = [Chunk(sequence([1] * 9, 8, [6, 5, 4]), 1), Chunk(sequence([1], 0, [3]), 1)]
    (group,) = build_step(chunks, 4, CPU).groups
    assert group.pages.tolist() == [[6, 5, 4], [3, 3, 3]]
