"""Trains one application in one precision from one seed, and returns the measurements.

The order of operations in a step is in `make_step`. Holds nothing that is particular to an application.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp_train as jmp
from jmp_train import diagnostics, flax_bridge

from ._application import Application, Precision, Variables

CURVE_POINTS = 100


def make_step(application: Application, precision: Precision) -> Callable[..., Any]:
    """`step(states, batch)` -> the next states, one a player, and their losses, float32 `[players]`."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states, batch):
        losses = []
        for number, player in enumerate(application.players):
            state = states[number]

            def loss_fn(params, states, batch, key, number=number, player=player):
                variables = [_variables(state) for state in states]
                variables[number] = {**variables[number], "params": params}
                return player.loss(variables, batch, key)

            grad_fn = jmp.value_and_grad(loss_fn, precision.policy, has_aux=True)
            key = state.step_rngs["loss"]
            (loss, model_state), grads = grad_fn(state.params, states, batch, key, loss_scale=jmp.get_loss_scale(state))
            state = state.apply_gradients(grads=grads, model_state=model_state)
            states = (*states[:number], state, *states[number + 1 :])
            losses.append(loss)
        return states, jnp.stack(losses)

    return step


def first_states(application: Application, precision: Precision, optimizers: Any, seed: int) -> tuple[Any, ...]:
    """A training state for each player; the same numbers for every precision, before they are rounded."""
    states = []
    for number, (player, tx) in enumerate(zip(application.players, optimizers, strict=True)):
        init_key, loss_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        variables = dict(player.init(init_key))
        params = jmp.get_policy(precision.policy).cast_to_param(variables.pop("params"))
        states.append(
            flax_bridge.TrainState.create(
                apply_fn=player.loss, params=params, model_state=variables, rngs={"loss": loss_key}, tx=tx
            )
        )
    return tuple(states)


class Run(NamedTuple):
    """The result of a training run: the record that is stored, its last states, and the batches that follow."""

    record: dict[str, Any]
    states: tuple[Any, ...]
    batches: Iterator[Any]


def trainer(application: Application, precision: Precision) -> Callable[[int], Run]:
    """`train(seed)`, compiled once for all seeds."""
    step = make_step(application, precision)
    optimizers = [precision.optimizer(player.optimizer) for player in application.players]

    def train(seed: int) -> Run:
        states, batches = first_states(application, precision, optimizers, seed), application.batches(seed)
        losses, started = [], time.perf_counter()
        for batch in itertools.islice(batches, application.steps):
            states, loss = step(states, batch)
            losses.append(loss)
        losses = np.asarray(jnp.stack(losses), np.float64)
        seconds = time.perf_counter() - started
        metrics = [jmp.step_metrics(state.opt_state) for state in states]
        metric = float(application.evaluate([wide_variables(state) for state in states]))
        record = {
            "metric": metric if math.isfinite(metric) else None,
            "losses": _curve(losses),
            "skipped": [int(m["skipped_steps"]) for m in metrics],
            "loss_scale": [float(m["loss_scale"]) for m in metrics],
            "seconds": round(seconds, 2),
        }
        return Run(record, states, batches)

    return train


def gradients_lost(application: Application, run: Run) -> list[dict[str, float]]:
    """For each player, the share of activation gradients that float16 turns into zero, without and with a loss scale.

    In percent, for the next batch after a run in float32, when gradients are small. The scale is that of
    `suggest_loss_scale`.
    """
    batch, lost = next(run.batches), []
    for number, (player, state) in enumerate(zip(application.players, run.states, strict=True)):

        def loss_fn(params, batch, number=number, player=player, state=state):
            variables = [_variables(state) for state in run.states]
            variables[number] = {**variables[number], "params": params}
            return player.loss(variables, batch, state.step_rngs["loss"])[0]

        histogram = diagnostics.backward_histogram(jax.grad(loss_fn))(state.params, batch)
        scale = float(diagnostics.suggest_loss_scale(histogram))
        unscaled, scaled = (diagnostics.underflow_report(histogram, "float16", by).total for by in (1.0, scale))
        lost.append(
            {
                "zero unscaled": 100 * float(unscaled.becomes_zero),
                "subnormal unscaled": 100 * float(unscaled.becomes_subnormal),
                "zero scaled": 100 * float(scaled.becomes_zero),
                "suggested scale": scale,
            }
        )
    return lost


def wide_variables(state: flax_bridge.TrainState) -> Variables:
    """The variables to evaluate, float32: the master parameters if there are any."""
    params = state.params
    if any(isinstance(leaf, jmp.MasterWeightsState) for leaf in _nodes(state.opt_state)):
        params = jmp.master_params(state.opt_state)
    return jmp.cast_to_full({"params": params, **state.model_state})


def _nodes(opt_state: Any) -> list[Any]:
    return jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, jmp.MasterWeightsState))


def _variables(state: flax_bridge.TrainState) -> Variables:
    return {"params": state.params, **state.model_state}


def _curve(losses: np.ndarray) -> list[list[float | None]]:
    """Each player's losses as means over equal intervals, to five digits; `None` where not finite."""
    stretches = np.array_split(losses, min(CURVE_POINTS, len(losses)))
    means = np.stack([stretch.mean(0) for stretch in stretches], axis=1)
    return [[float(f"{value:.5g}") if math.isfinite(value) else None for value in player] for player in means]
