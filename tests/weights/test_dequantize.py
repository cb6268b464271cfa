import gguf
import numpy as np
import pytest
import torch

from edge.errors import WeightsError
from edge.weights.dequantize import DECODERS, dequantize, unpack
from edge.weights.gguf import BLOCKS, GgmlType

NUM_BLOCKS = 96


def random_blocks(kind: GgmlType, seed: int) -> np.ndarray:
    """Random bytes without infinities or NaN, which compare unequal to themselves."""
    generator = np.random.default_rng(seed)
    _, size = BLOCKS[kind]
    blocks = generator.integers(0, 256, (NUM_BLOCKS, size), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q6_K": [208]}
    for at in halves.get(kind.name, [0, 2] if kind.name.endswith("_K") else []):
        blocks[:, at : at + 2] = generator.normal(size=(NUM_BLOCKS, 1)).astype(np.float16).view(np.uint8)
    if kind.name in ("F32", "F16", "BF16"):
        floats = torch.from_numpy(generator.normal(size=NUM_BLOCKS)).to(getattr(torch, NAMES[kind.name]))
        blocks = floats.view(torch.uint8).numpy().reshape(NUM_BLOCKS, size)
    return blocks


NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@pytest.mark.parametrize("kind", list(DECODERS), ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(4))
def test_is_bit_equal_to_the_gguf_package(kind: GgmlType, seed: int) -> None:
    blocks = random_blocks(kind, seed)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(int(kind))).astype(np.float32)
    shape = (NUM_BLOCKS // 8, 8 * BLOCKS[kind][0])
    values = dequantize(torch.from_numpy(blocks.reshape(-1).copy()), kind, shape)
    assert values.shape == shape
    assert values.dtype == torch.float32
    assert values.numpy().tobytes() == expected.reshape(shape).tobytes()


def test_a_tensor_of_several_chunks_is_decoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.from_numpy(random_blocks(GgmlType.Q4_1, 7).reshape(-1).copy())
    whole = dequantize(blocks, GgmlType.Q4_1, (NUM_BLOCKS, 32))
    monkeypatch.setattr("edge.weights.dequantize.CHUNK_VALUES", 320)
    assert torch.equal(dequantize(blocks, GgmlType.Q4_1, (NUM_BLOCKS, 32)), whole)


def test_an_unsupported_type_names_the_supported_ones() -> None:
    with pytest.raises(WeightsError, match=r"IQ2_XXS are not supported \(supported: F32, F16"):
        dequantize(torch.zeros(66, dtype=torch.uint8), GgmlType.IQ2_XXS, (1, 256))


QUANTIZED = [kind for kind in DECODERS if kind.name.startswith("Q")]


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(3))
def test_codes_and_scales_mean_the_same_values(kind: GgmlType, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.weights.dequantize.CHUNK_VALUES", 2560)  # several parts
    blocks = torch.from_numpy(random_blocks(kind, seed).reshape(-1).copy())
    shape = (NUM_BLOCKS // 8, 8 * BLOCKS[kind][0])
    values, matrix = dequantize(blocks, kind, shape), unpack(blocks, kind, shape)
    assert matrix is not None
    assert matrix.shape == shape
    assert matrix.bits == (4 if kind.name in ("Q4_0", "Q4_1", "Q4_K") else 8)
    if kind.name.endswith("_K"):
        largest = values.abs().view(-1, matrix.group).amax(-1)
        errors = (matrix.dequantize() - values).abs().view(-1, matrix.group).amax(-1)
        # Scale and minimum are rounded to 11 bits each, and what they are added to may be smaller than both.
        bound = 2**-11 * (matrix.scales.float().abs() * 63 + matrix.minimums.float().abs()).flatten()
        assert (errors <= bound).all()
        assert float(errors.mean() / largest.mean()) < 3e-4
    else:
        assert torch.equal(matrix.dequantize(), values)


def test_what_has_no_codes() -> None:
    assert unpack(torch.zeros(128, dtype=torch.uint8), GgmlType.F32, (1, 32)) is None
    assert unpack(torch.zeros(34, dtype=torch.uint8), GgmlType.Q8_0, (32,)) is None
