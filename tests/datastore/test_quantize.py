"""Product quantization: torch decodes what FAISS coded."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
import torch

from gnnlm.datastore.quantize import CodedTable, Quantizer, check_bytes, train_quantizer
from gnnlm.errors import ConfigError
from gnnlm.gnn.attend import attend


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((600, 4)) @ rng.standard_normal((4, 12)) + 5 + 0.1 * rng.standard_normal((600, 12))
    ).astype("f")


@pytest.fixture(scope="module")
def quantizer(vectors: np.ndarray) -> Quantizer:
    return train_quantizer(vectors, 4, seed=0)


def test_decoding_is_faiss_decoding(vectors: np.ndarray, quantizer: Quantizer) -> None:
    """The same codes through FAISS's own rotation and quantizer."""
    opq, pq = faiss.OPQMatrix(12, 4), faiss.ProductQuantizer(12, 4, 8)
    faiss.copy_array_to_vector(quantizer.rotation_DD.numpy().ravel(), opq.A)
    opq.is_trained, opq.is_orthonormal = True, True
    faiss.copy_array_to_vector(quantizer.codebook_Mcd.numpy().ravel(), pq.centroids)
    centred = vectors - quantizer.mean_D.numpy()
    codes = pq.compute_codes(opq.apply(centred))
    ours = quantizer.encode(vectors)
    assert (codes == ours).mean() > 0.999  # a tie may go either way
    want = opq.reverse_transform(pq.decode(codes)) + quantizer.mean_D.numpy()
    got = quantizer.decode(torch.from_numpy(codes)).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_the_rotation_turns_and_does_not_stretch(quantizer: Quantizer) -> None:
    product = quantizer.rotation_DD @ quantizer.rotation_DD.T
    torch.testing.assert_close(product, torch.eye(12), rtol=0, atol=1e-4)


def test_most_of_the_variance_is_kept(vectors: np.ndarray, quantizer: Quantizer) -> None:
    decoded = quantizer.decode(torch.from_numpy(quantizer.encode(vectors))).numpy()
    lost = np.square(decoded - vectors).sum() / np.square(vectors - vectors.mean(0)).sum()
    assert lost < 0.05


def test_attention_over_codes_is_attention_over_decoded_vectors(vectors: np.ndarray, quantizer: Quantizer) -> None:
    g = torch.Generator().manual_seed(0)
    codes = torch.from_numpy(quantizer.encode(vectors))
    beside = torch.randn(9, 3, generator=g)
    query, bias = torch.randn(5, 2, 15, generator=g), torch.randn(5, 2, 7, generator=g)
    lines, other = torch.randint(0, 600, (5, 7), generator=g), torch.randint(0, 9, (5, 7), generator=g)
    mask = torch.rand(5, 7, generator=g) > 0.3
    mask[2] = False
    got = attend(query, bias, mask, (CodedTable(codes, quantizer), beside), (lines, other))
    want = attend(query, bias, mask, (quantizer.decode(codes), beside), (lines, other))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (got[2] == 0).all()


def test_learning_is_the_same_twice(vectors: np.ndarray, quantizer: Quantizer) -> None:
    """Up to the order in which threads add."""
    again = train_quantizer(vectors, 4, seed=0)
    torch.testing.assert_close(again.codebook_Mcd, quantizer.codebook_Mcd, rtol=1e-2, atol=1e-2)


def test_refusals(vectors: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"codec.bytes must divide 576, .* \(got 128\); use 96 or 144"):
        check_bytes(576, 128, "codec.bytes")
    with pytest.raises(ConfigError, match=r"\(got 99\); use 12$"):
        train_quantizer(vectors, 99, seed=0)
    with pytest.raises(ConfigError, match="at least 256 vectors"):
        train_quantizer(vectors[:200], 4, seed=0)
