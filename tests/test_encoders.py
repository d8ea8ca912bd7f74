"""Encoders: what comes back of a block, what is owed and paid later, and training with them."""

from __future__ import annotations

import math
from typing import Any

import encoded_resnet
import encoded_steps as steps
import pytest
import torch
from by_host import HOSTS as BY_HOST
from pool import HOSTS, Pool

from parallax.errors import StrategyError
from parallax.graph.analysis.variables import Variable
from parallax.runtime.encoded.pool import STATE
from parallax.strategy.cost import bytes_across, bytes_per_step
from parallax.strategy.data import Strategy, VariableStrategy, fingerprint
from parallax.strategy.encoders import BlockEncoder, SumEncoder, encoders, register
from parallax.strategy.verify import verify

BLOCKS = ("fp16", "bf16", "int8", "onebit", "topk")
LOSSY: list[tuple[str, dict[str, float]]] = [
    ("fp16", {"feedback": 1}),
    ("bf16", {"feedback": 1}),
    ("int8", {}),
    ("onebit", {"block": 64}),
    ("topk", {"ratio": 0.05, "block": 128}),
    ("powersgd", {"rank": 2}),
]


def round_trip(name: str, values: torch.Tensor, **options: float) -> torch.Tensor:
    """Blocks after encoding and decoding; checks that the encoded bytes are as announced."""
    encoder = encoders()[name](options)
    assert isinstance(encoder, BlockEncoder)
    rows = values.view(-1, encoder.block)
    fields = [torch.empty(len(rows), n, dtype=dtype) for dtype, n in encoder.fields]
    before = rows.clone()
    encoder.encode(rows, fields)
    assert torch.equal(rows.nan_to_num(), before.nan_to_num()), "the values were changed"
    sent = sum(field.numel() * field.element_size() for field in fields)
    assert sent == encoder.encoded_bytes((values.numel(),), 4)
    out = torch.full_like(rows, 7.0)
    encoder.decode(fields, out)
    return out.view(values.shape)


def example(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(8192, generator=generator, dtype=torch.float64)
    # Blocks of very different sizes, as gradients of several layers.
    return (values * scale * torch.logspace(0, -12, 8).repeat_interleave(1024)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_rounding_stays_within_its_bounds(dtype: torch.dtype, scale: float) -> None:
    values = example(dtype, scale)
    largest = values.view(-1, 1024).abs().amax(1).repeat_interleave(1024)
    error = (round_trip("fp16", values) - values).abs()
    assert (error <= values.abs() * 2**-11 + largest * 2**-39).all()
    assert ((round_trip("bf16", values) - values).abs() <= values.abs() * 2**-8).all()
    error = (round_trip("int8", values, block=1024) - values).abs()
    assert (error <= largest / 252 * (1 + 1e-5)).all()


def test_fp16_takes_what_is_out_of_its_range() -> None:
    values = torch.zeros(2048)
    values[:4] = torch.tensor([3e38, -3e38, 1e33, 65_520.0])
    values[1024:1028] = torch.tensor([1e-30, -1e-30, 1e-38, 1e-45])
    result = round_trip("fp16", values)
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result[:3], values[:3], rtol=2**-11, atol=0)
    torch.testing.assert_close(result[1024:1027], values[1024:1027], rtol=2**-11, atol=1e-41)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk"])
def test_nan_and_infinity_stay_in_their_places(name: str) -> None:
    values = example()
    values[3], values[4], values[1030], values[5000] = torch.nan, torch.inf, -torch.inf, torch.nan
    values[2048:3072] = 0
    values[2050] = -torch.inf
    result = round_trip(name, values)
    special = ~torch.isfinite(values)
    assert torch.equal(torch.isfinite(result), ~special)
    assert torch.equal(result[special].nan_to_num(1, 2, 3), values[special].nan_to_num(1, 2, 3))


def test_one_bit_gives_the_two_means() -> None:
    values = example()
    result = round_trip("onebit", values)
    for rows, decoded in zip(values.view(-1, 1024), result.view(-1, 1024), strict=True):
        above = rows >= 0
        torch.testing.assert_close(decoded[above], rows[above].mean().expand(int(above.sum())))
        torch.testing.assert_close(decoded[~above], rows[~above].mean().expand(int((~above).sum())))
    zeros = round_trip("onebit", torch.zeros(1024))
    assert torch.equal(zeros, torch.zeros(1024))
    poisoned = values.clone()
    poisoned[5], poisoned[1024] = torch.nan, torch.inf
    result = round_trip("onebit", poisoned)
    assert result[:1024].isnan().all()
    second = poisoned[1024:2048] >= 0
    assert (result[1024:2048][second] == torch.inf).all()
    assert torch.isfinite(result[2048:]).all()


def test_top_k_keeps_the_largest_and_the_first_of_equals() -> None:
    values = example()
    result = round_trip("topk", values, ratio=0.01)
    for rows, decoded in zip(values.view(-1, 1024), result.view(-1, 1024), strict=True):
        kept = decoded != 0
        assert int(kept.sum()) == math.ceil(10.24)
        assert torch.equal(decoded[kept], rows[kept])
        assert rows[kept].abs().min() >= rows[~kept].abs().max()
    equal = torch.tensor([-1.0, 1.0] * 512)
    equal[[700, 900]] = torch.tensor([2.0, -2.0])
    result = round_trip("topk", equal, ratio=0.01)
    assert result.nonzero().flatten().tolist() == [*range(9), 700, 900]
    assert torch.equal(round_trip("topk", values, ratio=1.0), values)


def test_powersgd_is_exact_for_what_has_its_rank() -> None:
    encoder = encoders()["powersgd"]({"rank": 3})
    assert isinstance(encoder, SumEncoder)
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (40, 60))
    matrix = (left @ right.t()).view(40, 5, 12)
    assert encoder.sizes(matrix.shape) == (120, 180)
    coder = encoder.coder("w", matrix.shape, torch.float64, torch.device("cpu"))
    out = torch.empty_like(matrix)
    for gradient in (matrix, matrix * 0, matrix / 0, matrix):
        own = coder.values(gradient, None)
        last = coder.values(gradient, own.reshape(-1))
        coder.decode(last.reshape(-1), out)
        if torch.isfinite(gradient).all():
            torch.testing.assert_close(out, gradient, rtol=0, atol=1e-10)
        else:
            assert out.isnan().all()
        coder.remember(last.reshape(-1))
        assert torch.isfinite(coder.memory).all()
    assert encoder.sizes((64,)) == encoder.sizes((4, 4)) == encoder.sizes((0, 9)) == ()


@pytest.mark.parametrize(
    ("name", "options", "shape", "count"),
    [
        ("fp16", {}, (100, 100), 10 * (4 + 2 * 1024)),
        ("fp16", {}, (1000,), 4000),
        ("bf16", {}, (100, 100), 40 * 512),
        ("int8", {}, (100, 100), 40 * (4 + 256)),
        ("int8", {"block": 1000}, (100, 100), 10 * 1004),
        ("onebit", {}, (100, 100), 10 * (8 + 128)),
        ("topk", {}, (100, 100), 10 * 11 * 6),
        ("topk", {"ratio": 0.1, "block": 100}, (100, 100), 100 * 10 * 6),
        ("powersgd", {}, (100, 10, 10), 4 * 4 * 200),
        ("powersgd", {"rank": 60}, (100, 100), 40_000),
    ],
)
def test_formulas(name: str, options: dict[str, float], shape: tuple[int, ...], count: int) -> None:
    variable = Variable("w", shape, torch.float32, True)
    choice = VariableStrategy("allreduce", encoder=name, encoder_options=options)
    assert bytes_per_step(variable, choice, 4) == pytest.approx(2 * 3 / 4 * count)
    # Blocks go to their owners, of whom two are on the other host; sums of a ring to the next one.
    ring = name == "powersgd"
    across = 2 * 3 / 4 * count / 2 if ring else 2 * 2 / 4 * count
    assert bytes_across(variable, choice, 4, 2) == pytest.approx(across)


FOUND: list[tuple[dict[str, Any], str]] = [
    (
        {"encoder": "fp61"},
        "encoder 'fp61' is unknown (encoder: use fp16; there are none, fp16, bf16, int8, onebit, ",
    ),
    ({"encoder": "zip"}, "encoder 'zip' is unknown (encoder: use one of none, fp16, "),
    (
        {"encoder_options": {"ratio": 1}},
        "it has options of an encoder, but none is named (encoder_options: name an encoder, or ",
    ),
    (
        {"encoder": "topk", "encoder_options": {"ration": 0.1}},
        "topk has no option 'ration' (encoder_options: use ratio; there are ratio, block)",
    ),
    (
        {"encoder": "topk", "encoder_options": {"ratio": 2}},
        "'ratio' of topk is 2 (encoder_options: it must be from 0.0001 to 1)",
    ),
    (
        {"encoder": "topk", "encoder_options": {"ratio": math.nan}},
        "'ratio' of topk is nan (encoder_options: it must be from 0.0001 to 1)",
    ),
    (
        {"encoder": "int8", "encoder_options": {"block": 100}},
        "'block' of int8 is 100 (encoder_options: it must be a multiple of 8)",
    ),
    (
        {"encoder": "powersgd", "encoder_options": {"rank": 1.5}},
        "'rank' of powersgd is 1.5 (encoder_options: it must be a multiple of 1)",
    ),
    (
        {"synchronizer": "owner", "owners": (0,), "encoder": "int8"},
        "owner cannot sum encoded values (encoder: use 'none', or synchronizer 'allreduce')",
    ),
    (
        {"encoder": "powersgd", "hierarchy": "hosts"},
        "gradients encoded by powersgd are summed by all workers alike (hierarchy: use 'flat', or ",
    ),
    (
        {"encoder": "fp16", "reduction": "ring"},
        "reduction 'ring' cannot be used with encoder 'fp16', which sums in a way of its own ",
    ),
    (
        {"synchronizer": "allgather", "encoder": "int8"},
        "allgather cannot send rows encoded by int8 (encoder: use 'none' or 'bf16')",
    ),
    (
        {"synchronizer": "allgather", "encoder": "bf16", "encoder_options": {"feedback": 1}},
        "allgather keeps no residuals of rows (encoder_options: leave 'feedback' out, or use 0)",
    ),
    (
        {"encoder": "fp16", "pieces": 2},
        "gradients encoded by fp16 travel whole (pieces: use 1, or encoder 'none')",
    ),
]


@pytest.mark.parametrize(("fields", "text"), FOUND)
def test_what_does_not_fit_is_named(fields: dict[str, Any], text: str) -> None:
    variables = [Variable("w", (300, 40), torch.float32, True)]
    choice = VariableStrategy(**{"synchronizer": "allreduce", **fields})
    with pytest.raises(StrategyError) as caught:
        verify(Strategy(fingerprint(variables), 2, {"w": choice}), variables, 2)
    assert f"'w': {text}" in str(caught.value)


def test_only_floating_point_gradients_are_encoded() -> None:
    variables = [Variable("w", (300, 40), torch.complex64, True)]
    choice = VariableStrategy("allreduce", encoder="fp16")
    with pytest.raises(StrategyError, match="fp16 encodes floating-point gradients, not torch"):
        verify(Strategy(fingerprint(variables), 2, {"w": choice}), variables, 2)


def test_names_of_encoders_are_taken_once() -> None:
    class Other(encoders()["fp16"]):  # type: ignore[misc]
        pass

    with pytest.raises(StrategyError, match="There is an encoder 'fp16' already"):
        register(Other)


# -- With workers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in ("none", *dict(LOSSY))),
        *((name, 3) for name in ("int8", "onebit", "powersgd")),
    ],
)
def test_replicas_stay_equal_and_bytes_are_as_planned(pool: Pool, name: str, size: int) -> None:
    options = dict(LOSSY).get(name, {})
    found = pool.run(size, steps.trained, name, options, 10, False)
    assert len({one["parameters"] for one in found}) == 1
    sent = sum(one["sent"] for one in found) / size
    assert sent == pytest.approx(found[0]["formula"], rel=0.05)
    expected = steps.one_device(size, 10)
    # Close to one device: rounding hardly shows, and what is left out is small or comes later.
    near = {"none": 1e-4, "fp16": 1e-3, "bf16": 1e-2, "int8": 1e-2}.get(name, 0.1)
    assert found[0]["losses"] == pytest.approx(expected, rel=near)


def test_batches_of_other_sizes_and_empty_ones(pool: Pool) -> None:
    for name, options in LOSSY:
        found = pool.run(2, steps.trained, name, options, 6, True)
        assert len({one["parameters"] for one in found}) == 1, name


def test_what_is_not_sent_is_owed_and_paid(pool: Pool) -> None:
    for name, options in LOSSY:
        few, many = (pool.run(3, steps.owed, name, options, n)[0] for n in (5, 60))
        assert few["difference"] < 1e-10, name
        assert many["difference"] < 1e-10, name
        # What is missing of the sum of all steps gets smaller beside it.
        assert many["missing"] < 0.35 * few["missing"], (name, few, many)


@pytest.mark.parametrize("count", [5, 12])
def test_what_is_owed_keeps_its_worth_when_batches_differ(pool: Pool, count: int) -> None:
    for name, options in LOSSY:
        for found in pool.run(3, steps.owed, name, options, count, False, True):
            assert found["difference"] < 1e-10, name


@pytest.mark.parametrize(
    ("name", "hosts"), [("int8", HOSTS[0]), ("topk", HOSTS[1]), ("powersgd", HOSTS[0])]
)
def test_inside_hosts_nothing_is_encoded(pool: Pool, name: str, hosts: tuple[int, ...]) -> None:
    """Four workers on two hosts; PowerSGD needs no second level, since its sums go round a ring."""
    options = dict(LOSSY)[name]
    found = pool.run(hosts, steps.trained, name, options, 8, False, BY_HOST)
    assert len({one["parameters"] for one in found}) == 1
    assert found[0]["levels"] == {"flat" if name == "powersgd" else "hosts"}
    for kind, formula in (("sent", "formula"), ("across", "formula across")):
        sent = sum(one[kind] for one in found) / len(found)
        assert sent == pytest.approx(found[0][formula], rel=0.05), kind
    assert found[0]["losses"] == pytest.approx(steps.one_device(4, 8), rel=0.1)
    if name != "powersgd":
        paid = pool.run(hosts, steps.owed, name, options, 5, True)
        assert paid[0]["difference"] < 1e-10


def test_rows_of_half_types_are_no_smaller() -> None:
    variables = [Variable("w", (300, 40), torch.float16, True, sparse=True)]
    choice = VariableStrategy("allgather", encoder="bf16")
    with pytest.raises(StrategyError, match=r"rows of torch\.float16 are no smaller"):
        verify(Strategy(fingerprint(variables), 2, {"w": choice}), variables, 2)


@pytest.mark.parametrize("option", ["HYBRID", "AR"])
def test_rows_travel_as_bfloat16(pool: Pool, option: str) -> None:
    """Rows and their gradients take half of the bytes, and come near to what they are."""
    whole, half = (pool.run(2, steps.rows, option, encoder) for encoder in ("none", "bf16"))
    for one in (*whole, *half):
        assert one["sent"] == pytest.approx(one["formula"], rel=0.05)
    assert half[0]["synchronizer"] == whole[0]["synchronizer"] != "allreduce"
    assert f"{half[0]['synchronizer']}, bf16" in half[0]["plan"]
    # 64 values of 2 instead of 4 bytes, and ids.
    assert half[0]["formula"] < 0.55 * whole[0]["formula"]
    difference = (half[0]["table"] - whole[0]["table"]).abs()
    assert 0 < float(difference.max()) < 0.02 * float(whole[0]["moved"])
    assert torch.equal(half[0]["table"], half[1]["table"])


@pytest.mark.parametrize("name", [name for name, _ in LOSSY])
def test_one_workers_nan_is_seen_by_all(pool: Pool, name: str) -> None:
    found = pool.run(2, steps.specials, name, dict(LOSSY)[name])
    for results in found:
        for step, gradients in results.items():
            marked = gradients[0][3, 4], gradients[1][2]
            if step == 0:
                assert all(value.isnan() for value in marked)
            elif step == 1:
                assert not any(torch.isfinite(value) for value in marked)
            else:  # nothing of them is left in residuals
                assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_messages_start_while_gradients_are_made(pool: Pool, name: str) -> None:
    # One by the full bucket; then its second one, and the first of the other bucket.
    assert pool.run(3, steps.started_early, name) == [[1, 3, 1, 3]] * 3


@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_training_goes_on_from_its_state(pool: Pool, name: str) -> None:
    for whole, resumed, without in pool.run(2, steps.continued, name, dict(LOSSY)[name]):
        assert whole == resumed
        assert without != resumed


def test_a_refused_step_leaves_residuals_as_they_were(pool: Pool) -> None:
    for name in ("onebit", "powersgd"):
        assert pool.run(2, steps.refused_step, name, dict(LOSSY)[name]) == [True, True]


def test_residuals_move_to_another_number_of_workers(pool: Pool) -> None:
    options = dict(LOSSY)["topk"]
    given = pool.run(3, steps.saved, "topk", options, None)[0]
    kept = given[STATE]
    assert {len(parts["residuals"]) for parts in kept.values()} == {3}
    for unread, loaded in pool.run(2, steps.saved, "topk", options, given):
        for name, parts in kept.items():
            assert torch.equal(unread[STATE][name]["residuals"], parts["residuals"])
            first, second, third = parts["residuals"]
            now = loaded[STATE][name]
            assert torch.equal(now["residuals"], torch.stack([first + third, second]))
            assert torch.equal(now["sums"], parts["sums"])


def test_states_that_do_not_fit_are_refused(pool: Pool) -> None:
    found = pool.run(2, steps.bad_states)[0]
    wanted = (
        "'parallax.encoders' is a int, not a state of encoders",
        "unexpected 'net.9' in 'parallax.encoders'",
        "are of (5,), expected (",
        "is not the state of an encoder",
    )
    assert len(found) == len(wanted)
    assert all(text in message for text, message in zip(wanted, found, strict=True)), found


@pytest.fixture(scope="module")
def exact(pool: Pool) -> dict[str, Any]:
    """The residual network without an encoder."""
    result: dict[str, Any] = pool.run(2, encoded_resnet.accuracy, "none", {})[0]
    return result


@pytest.mark.long
@pytest.mark.parametrize("name", encoders())
def test_the_residual_network_learns_as_well(pool: Pool, exact: dict[str, Any], name: str) -> None:
    """Within one point of exact training, with each encoder as it is by default."""
    assert exact["accuracy"] > 0.95
    found = pool.run(2, encoded_resnet.accuracy, name, {})[0]
    print(name, found, exact)
    assert found["accuracy"] >= exact["accuracy"] - 0.01
    assert found["bytes"] < 0.55 * exact["bytes"]
