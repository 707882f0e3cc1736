"""The embedded data."""

import hashlib

import pytest

from rbdc.data import embedded


@pytest.mark.parametrize(("split", "per_class"), [("train", 1000), ("test", 200)])
def test_the_embedded_images_are_real_and_balanced(split: str, per_class: int) -> None:
    data = embedded(split)
    assert data.images.shape == (10 * per_class, 1, 28, 28)
    assert data.labels.bincount().tolist() == [per_class] * 10
    assert len(data.class_names) == 10
    assert 60 < data.images.float().mean() < 90  # Fashion-MNIST's mean is 72.9


def test_the_embedded_images_are_those_the_script_makes() -> None:
    digest = hashlib.sha256()
    for split in ("train", "test"):
        data = embedded(split)
        digest.update(data.images.numpy().tobytes())
        digest.update(data.labels.byte().numpy().tobytes())
    expected = "d5b91c929ef64cdf3fac6a13820932f698037ef77030a9584f3d6499a1ccee00"
    assert digest.hexdigest() == expected
