"""Mamba2 on the CPU: a sequence gives the same values however it is cut, and the same as the formulas."""

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from tutti_sglang.integration.cpu_mamba import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba_chunk_scan_combined,
    selective_state_update,
    track_mamba_states_if_needed,
)

CHANNELS, WIDTH, HEADS, P, N, GROUPS = 6, 4, 4, 3, 5, 2
LENGTHS = (7, 1, 12)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def _starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def _convolved(x: torch.Tensor, states: torch.Tensor, slots: list[int], lengths: tuple[int, ...], *, resumed: bool):
    return causal_conv1d_fn(
        x,
        WEIGHT,
        BIAS,
        query_start_loc=_starts(lengths),
        cache_indices=torch.tensor(slots),
        has_initial_state=torch.full((len(lengths),), resumed),
        conv_states=states,
    )


WEIGHT, BIAS = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)


def test_a_convolution_sees_the_last_tokens_of_its_own_sequence() -> None:
    x = torch.randn(CHANNELS, sum(LENGTHS))
    states = torch.randn(9, CHANNELS, WIDTH - 1)
    out = _convolved(x, states, [3, 5, 1], LENGTHS, resumed=False)
    for start, length in zip(_starts(LENGTHS).tolist(), LENGTHS, strict=False):
        for t in range(length):
            seen = [x[:, start + t - back] if t >= back else torch.zeros(CHANNELS) for back in range(WIDTH - 1, -1, -1)]
            value = (torch.stack(seen, 1) * WEIGHT).sum(1) + BIAS
            torch.testing.assert_close(out[:, start + t], torch.nn.functional.silu(value))


def test_a_convolution_goes_on_from_its_state_in_chunks_and_token_by_token() -> None:
    x = torch.randn(CHANNELS, 12)
    states = torch.zeros(4, CHANNELS, WIDTH - 1)
    whole = _convolved(x, states, [1], (12,), resumed=False)
    first = _convolved(x[:, :2], states, [2], (2,), resumed=False)
    second = _convolved(x[:, 2:9], states, [2], (7,), resumed=True)
    rest = [
        causal_conv1d_update(x[:, t][None], states, WEIGHT, BIAS, "silu", conv_state_indices=torch.tensor([2]))[0]
        for t in range(9, 12)
    ]
    torch.testing.assert_close(torch.cat([first, second, torch.stack(rest, 1)], 1), whole)
    torch.testing.assert_close(states[2], states[1])


class _Scan:
    """Random inputs of one row of tokens."""

    def __init__(self, tokens: int) -> None:
        self.x, self.dt = torch.randn(1, tokens, HEADS, P), torch.randn(1, tokens, HEADS)
        self.B, self.C = torch.randn(1, tokens, GROUPS, N), torch.randn(1, tokens, GROUPS, N)
        self.A, self.D, self.dt_bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)

    def run(self, start: int, end: int, lengths: tuple[int, ...], **more: object) -> tuple[torch.Tensor, ...]:
        cut = slice(start, end)
        out = torch.empty(1, end - start, HEADS, P)
        chunks, last, tracked = mamba_chunk_scan_combined(
            self.x[:, cut],
            self.dt[:, cut],
            self.A,
            self.B[:, cut],
            self.C[:, cut],
            4,
            D=self.D,
            dt_bias=self.dt_bias,
            cu_seqlens=_starts(lengths),
            out=out,
            **more,
        )
        return out[0], chunks[0], last, tracked

    def step(self, state: torch.Tensor, t: int) -> torch.Tensor:
        """What decoding would give for the token, in slot 2 of `state`."""
        out = torch.empty(1, HEADS, P)
        selective_state_update(
            state,
            self.x[:, t],
            self.dt[:, t, :, None].expand(-1, -1, P),
            self.A[:, None, None].expand(-1, P, N),
            self.B[:, t],
            self.C[:, t],
            self.D[:, None].expand(-1, P),
            dt_bias=self.dt_bias[:, None].expand(-1, P),
            state_batch_indices=torch.tensor([2]),
            out=out,
        )
        return out[0]


def test_a_scan_goes_on_from_its_state_in_chunks_and_token_by_token() -> None:
    scan = _Scan(12)
    whole, _, last, _ = scan.run(0, 12, (12,))
    first, _, middle, _ = scan.run(0, 5, (5,))
    second, _, later, _ = scan.run(5, 9, (4,), initial_states=middle)
    state = torch.zeros(4, HEADS, P, N)
    state[2] = later[0]
    rest = [scan.step(state, t) for t in range(9, 12)]
    torch.testing.assert_close(torch.cat([first, second, torch.stack(rest)]), whole)
    torch.testing.assert_close(state[2], last[0])


def test_sequences_of_a_scan_do_not_mix_and_leave_the_states_that_are_asked_for() -> None:
    scan = _Scan(sum(LENGTHS))
    out, chunks, last, tracked = scan.run(0, 20, LENGTHS, track_end_locs=torch.tensor([5, 10]))
    for place, (start, length) in enumerate(zip(_starts(LENGTHS).tolist(), LENGTHS, strict=False)):
        alone, _, end, _ = scan.run(start, start + length, (length,))
        torch.testing.assert_close(out[start : start + length], alone)
        torch.testing.assert_close(last[place], end[0])
    assert chunks.shape == (5, HEADS, P, N)  # one before each fourth token of the row
    torch.testing.assert_close(chunks[1], scan.run(0, 4, (4,))[2][0])
    torch.testing.assert_close(chunks[3], scan.run(8, 12, (4,))[2][0])
    torch.testing.assert_close(tracked[0, 0], scan.run(0, 5, (5,))[2][0])
    torch.testing.assert_close(tracked[0, 1], scan.run(8, 10, (2,))[2][0])


def test_states_under_the_mask_are_kept_aside_and_no_others() -> None:
    conv, ssm = torch.randn(6, 2, 3), torch.randn(6, 2, 2, 2)
    before = conv.clone(), ssm.clone()
    mask, target = torch.tensor([True, False]), torch.tensor([4, 5])
    track_mamba_states_if_needed(conv, ssm, torch.tensor([1, 2]), mask, target, 2)
    for now, old in zip((conv, ssm), before, strict=True):
        assert torch.equal(now[4], old[1])
        assert torch.equal(now[[0, 1, 2, 3, 5]], old[[0, 1, 2, 3, 5]])
