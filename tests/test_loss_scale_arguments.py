"""The arguments that a loss scale accepts, and the message for each that it does not."""

# Half of the tests pass arguments of the wrong type.
# pyright: reportArgumentType=false

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train import DynamicLossScale, NoOpLossScale, StaticLossScale


def test_a_scale_may_come_as_any_number():
    for number in (32768, 32768.0, np.float64(32768), np.float16(32768), jnp.float32(32768), jnp.bfloat16(32768)):
        assert DynamicLossScale(number) == DynamicLossScale()
        assert type(DynamicLossScale(number).loss_scale) is np.float32
        assert StaticLossScale(number) == StaticLossScale(2.0**15)
        assert type(StaticLossScale(number).loss_scale) is float
    assert StaticLossScale(0.1).loss_scale == float(np.float32(0.1))
    assert NoOpLossScale().loss_scale.dtype == np.float32


def test_the_defaults_and_a_state_that_has_fallen():
    assert DynamicLossScale() == DynamicLossScale(
        2.0**15,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        hysteresis=1,
        min_loss_scale=1.0,
        max_loss_scale=2.0**24,
    )
    assert DynamicLossScale(hysteresis=3, hysteresis_left=0).hysteresis_left == 0
    assert DynamicLossScale(hysteresis=3, hysteresis_left=1).hysteresis_left == 1


BAD = "Pass a number such as 2.0."
NORMAL = "has to be a normal float32 number, or gradients are flushed to zero. Pass a positive number such as 2.0**15."


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"loss_scale": 0}, f"`loss_scale` must lie in [2**-126, 2**126], got 0.0: 1 / loss_scale {NORMAL}"),
        ({"loss_scale": -2.0}, f"`loss_scale` must lie in [2**-126, 2**126], got -2.0: 1 / loss_scale {NORMAL}"),
        (
            {"loss_scale": 2.0**-127},
            f"`loss_scale` must lie in [2**-126, 2**126], got {2.0**-127}: 1 / loss_scale {NORMAL}",
        ),
        ({"loss_scale": np.nan}, f"`loss_scale` must be finite in float32, got nan. {BAD}"),
        ({"loss_scale": np.inf}, f"`loss_scale` must be finite in float32, got inf. {BAD}"),
        ({"loss_scale": 1e39}, f"`loss_scale` must be finite in float32, got 1e+39. {BAD}"),
        ({"loss_scale": [2.0, 4.0]}, f"`loss_scale` must be one real number, got [2.0, 4.0]. {BAD}"),
        ({"loss_scale": True}, f"`loss_scale` must be one real number, got True. {BAD}"),
        ({"loss_scale": 2j}, f"`loss_scale` must be one real number, got 2j. {BAD}"),
        ({"loss_scale": "2"}, f"`loss_scale` must be one real number, got '2'. {BAD}"),
        ({"loss_scale": None}, f"`loss_scale` must be one real number, got None. {BAD}"),
        (
            {"loss_scale": 0.5},
            "`loss_scale` (=0.5) must lie between `min_loss_scale` (=1.0) and `max_loss_scale` (=16777216.0). "
            "Move the bound or the starting point.",
        ),
        (
            {"min_loss_scale": 8, "max_loss_scale": 4},
            "`min_loss_scale` (=8.0) must not exceed `max_loss_scale` (=4.0). "
            "Swap them, or leave out one for its default.",
        ),
        (
            {"max_loss_scale": 2.0**127},
            f"`max_loss_scale` must lie in [2**-126, 2**126], got {2.0**127}: 1 / max_loss_scale {NORMAL}",
        ),
        (
            {"min_loss_scale": 0},
            f"`min_loss_scale` must lie in [2**-126, 2**126], got 0.0: 1 / min_loss_scale {NORMAL}",
        ),
        (
            {"growth_factor": 1},
            "`growth_factor` must be greater than 1, got 1.0: it multiplies the scale. "
            "Pass 2.0, or use StaticLossScale for a scale that never grows.",
        ),
        *(
            (
                {"backoff_factor": factor},
                f"`backoff_factor` must lie strictly between 0 and 1, got {float(factor)}: it multiplies the scale on "
                "overflow. Pass 0.5 (jmp's `factor=2` is growth_factor=2, backoff_factor=0.5).",
            )
            for factor in (0, 1, 2)
        ),
        ({"growth_interval": 0}, "`growth_interval` must be an integer from 1 to 2**31 - 1, got 0."),
        ({"growth_interval": 2**31}, "`growth_interval` must be an integer from 1 to 2**31 - 1, got 2147483648."),
        ({"growth_interval": 2.5}, "`growth_interval` must be an integer, got 2.5. Pass an integer such as 1."),
        ({"growth_interval": 2e3}, "`growth_interval` must be an integer, got 2000.0. Pass an integer such as 2000."),
        ({"growth_interval": 1e20}, "`growth_interval` must be an integer, got 1e+20. Pass an integer such as 1."),
        ({"growth_interval": True}, "`growth_interval` must be an integer from 1 to 2**31 - 1, got True."),
        ({"hysteresis": 0}, "`hysteresis` must be an integer from 1 to 2**31 - 1, got 0."),
        ({"counter": -1}, "`counter` must be an integer from 0 to 2**31 - 1, got -1."),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DynamicLossScale(**arguments)
    if "loss_scale" in arguments and arguments["loss_scale"] != 0.5:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            StaticLossScale(**arguments)


def test_the_remedies_that_errors_name_work():
    StaticLossScale(2.0**15)
    StaticLossScale(2.0**-126)
    DynamicLossScale(2.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1)


def test_static_arguments_cannot_be_traced():
    message = "`growth_factor` is part of the program and cannot be traced. Pass a Python number."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.jit(lambda x: DynamicLossScale(growth_factor=x).adjust(True))(2.0)


@pytest.mark.parametrize("scale", [NoOpLossScale(), StaticLossScale(8.0), DynamicLossScale(8.0)])
@pytest.mark.parametrize(
    "flag, got", [(np.array([True]), "bool of shape (1,)"), (1.0, "float32 of shape ()"), ([True], "list")]
)
def test_adjust_takes_one_boolean(scale, flag, got):
    message = f"`grads_finite` must be one boolean, got {got}. Pass the result of all_finite(grads)."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        scale.adjust(flag)
