"""Each layer type of the paper's supplement, on tensors small enough to write out."""

import torch
from torch import Tensor

from rbdc.coupling import Axes, couple_tensor

A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
B = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
O = torch.zeros(2, 2)  # noqa: E741
WEIGHT = Axes(scaled=(0, 1), input_axis=1)


def blocks(rows: list[list[Tensor]]) -> Tensor:
    return torch.cat([torch.cat(row, dim=1) for row in rows])


def test_linear_weight_is_block_diagonal() -> None:  # Eq. 1, 4, 5
    torch.testing.assert_close(couple_tensor(A, B, WEIGHT), blocks([[A, O], [O, B]]))


def test_qkv_is_block_diagonal_for_each_of_q_k_v() -> None:  # Eq. 3
    first, second = torch.cat([A, 2 * A, 3 * A]), torch.cat([B, 2 * B, 3 * B])
    wide = couple_tensor(first, second, Axes(scaled=(0, 1), input_axis=1, packed=(2, 2, 2)))
    expected = blocks([[A, O], [O, B], [2 * A, O], [O, 2 * B], [3 * A, O], [O, 3 * B]])
    torch.testing.assert_close(wide, expected)


def test_qkv_bias_is_concatenated_for_each_of_q_k_v() -> None:  # Eq. 3
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    wide = couple_tensor(first, second, Axes(scaled=(0,), packed=(1, 1, 1)))
    assert wide.tolist() == [1, 4, 2, 5, 3, 6]


def test_head_is_concatenated_and_halved() -> None:  # Eq. 6
    wide = couple_tensor(A, B, Axes(scaled=(1,), input_axis=1))
    torch.testing.assert_close(wide, torch.cat([A / 2, B / 2], dim=1))


def test_head_bias_is_the_mean() -> None:  # Eq. 6
    wide = couple_tensor(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0]), Axes(scaled=()))
    assert wide.tolist() == [2, 4]


def test_convolution_keeps_its_kernel() -> None:  # Eq. 7
    first, second = torch.randn(2, 3, 3, 3), torch.randn(2, 3, 3, 3)
    wide = couple_tensor(first, second, WEIGHT)
    assert wide.shape == (4, 6, 3, 3)
    torch.testing.assert_close(wide[:2, :3], first)
    torch.testing.assert_close(wide[2:, 3:], second)
    assert wide[:2, 3:].count_nonzero() == wide[2:, :3].count_nonzero() == 0


def test_norms_and_statistics_are_concatenated() -> None:  # Eq. 8, 9
    wide = couple_tensor(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), Axes(scaled=(0,)))
    assert wide.tolist() == [1, 2, 3, 4]


def test_stem_tokens_and_positions_are_concatenated_not_halved() -> None:
    patch = couple_tensor(
        torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4), Axes(scaled=(0,), input_axis=1)
    )
    token = couple_tensor(torch.ones(1, 1, 2), torch.ones(1, 1, 2), Axes(scaled=(2,)))
    assert patch.shape == (4, 3, 4, 4) and patch.eq(1).all()
    assert token.shape == (1, 1, 4) and token.eq(1).all()


def test_counters_stay_whole() -> None:
    wide = couple_tensor(torch.tensor(10), torch.tensor(13), Axes(scaled=()))
    assert wide.dtype == torch.int64 and wide.item() == 11


def test_off_diagonal_blocks_come_from_the_background_and_nothing_else_does() -> None:
    background = torch.full((4, 4), 9.0)
    wide = couple_tensor(A, B, WEIGHT, background)
    nine = torch.full((2, 2), 9.0)
    torch.testing.assert_close(wide, blocks([[A, nine], [nine, B]]))
    assert background.eq(9).all()
    packed = couple_tensor(A, B, Axes(scaled=(0, 1), input_axis=1, packed=(1, 1)), background)
    assert packed[0].tolist() == [1, 2, 9, 9] and packed[1].tolist() == [9, 9, 5, 6]


def test_inputs_are_left_alone() -> None:
    for axes in (WEIGHT, Axes(scaled=(0,)), Axes(scaled=())):
        first, second = A.clone(), B.clone()
        couple_tensor(first, second, axes).zero_()
        torch.testing.assert_close(first, A)
        torch.testing.assert_close(second, B)
