"""Cases of class 2: outer products and products that contract fewer than 16 numbers: positions, coordinates, states."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import expm
from jax.scipy.ndimage import map_coordinates
from product_case import Case, dense_params, mean_square, normal, smooth_images, uniform

# Positions


def rotate(x, positions):
    """Rotary embedding of `[b, l, h, d]`, as most code has it (Su et al. 2021)."""
    inverse = 1.0 / 10000 ** (jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = jnp.einsum("i,j->ij", positions, inverse)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def rotary(heads, queries, remat=False, scanned=False):
    """Attention with rotary embedding; the last `queries` positions ask."""

    def block(net, params, x, positions):
        size = params["q"].shape[1] // heads
        q, k, v = (net.dense(x, params[name]).reshape(*x.shape[:2], heads, size) for name in "qkv")
        q, k = rotate(q[:, -queries:], positions[-queries:]), rotate(k, positions)
        weights = jax.nn.softmax(net.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5)
        return net.dense(net.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape[0], queries, -1), params["o"])

    def loss(net, params, batch):
        x = batch["x"]
        positions = batch.get("positions", jnp.arange(x.shape[1]))
        if not scanned:
            return mean_square(block(net, params, x, positions) - batch["y"])
        step = jax.checkpoint(lambda x, layer: (x + block(net, layer, x, positions), None))
        x, _ = jax.lax.scan(step, x, params)
        return mean_square(x - batch["y"])

    return loss


def rotary_data(length, width, queries, given=False, layers=(), sharp=2.0):
    def data(rng):
        # Queries and keys large enough for weights that are not uniform: position matters.
        sizes = {"q": sharp, "k": sharp, "v": 1.0, "o": 1.0}
        params = {name: normal(rng, *layers, width, width, scale=by * width**-0.5) for name, by in sizes.items()}
        batch = {"x": normal(rng, 1, length, width), "y": normal(rng, 1, queries, width)}
        if given:
            batch["positions"] = np.arange(length)
        return params, batch

    return data


def position_table(net, params, batch):
    """A sin-cos table of an image's patches (He et al. 2022), patch embedding, attention over all patches."""
    x = net.conv(batch["image"], params["patch"], stride=4).reshape(batch["image"].shape[0], -1, 32)
    omega = 1.0 / 10000 ** (jnp.arange(8) / 8)
    rows, columns = jnp.meshgrid(*2 * [jnp.arange(32.0)], indexing="ij")
    parts = []
    for position in (rows, columns):
        angles = jnp.einsum("m,d->md", position.reshape(-1), omega)
        parts += [jnp.sin(angles), jnp.cos(angles)]
    x = x + jnp.concatenate(parts, axis=1)
    q, k, v = (net.dense(x, params[name]) for name in "qkv")
    weights = jax.nn.softmax(net.einsum("bqd,bkd->bqk", q[:, ::16], k) / 32**0.5)
    return mean_square(net.einsum("bqk,bkd->bqd", weights, v) - batch["y"])


def position_table_data(rng):
    params = {name: normal(rng, 32, 32, scale=32**-0.5) for name in "qkv"} | {
        "patch": normal(rng, 4, 4, 3, 32, scale=0.1)
    }
    return params, {"image": smooth_images(rng, 1, 128, 3), "y": normal(rng, 1, 64, 32)}


def time_embedding(net, params, batch):
    """A denoiser that is told the time of diffusion by sines and cosines (Ho et al. 2020), written with einsum."""
    frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(32) / 32)
    angles = jnp.einsum("b,f->bf", batch["t"], frequencies)
    told = net.mlp(params, jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1), "time_")
    return mean_square(net.mlp(params, batch["x"] + told) - batch["noise"])


def time_embedding_data(rng):
    batch = {"t": uniform(rng, 0, 1000, 128), "x": normal(rng, 128, 32), "noise": normal(rng, 128, 32)}
    return dense_params(rng, 64, 64, 32, name="time_") | dense_params(rng, 32, 64, 32), batch


def calendar(net, params, batch):
    """Daily, weekly and yearly waves of hours since 2020, as an outer product."""
    angles = jnp.einsum("t,k->tk", batch["hours"], 2 * jnp.pi / jnp.array([24.0, 168.0, 8766.0]))
    features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles), batch["x"]], axis=-1)
    return mean_square(net.mlp(params, features) - batch["y"])


def calendar_data(rng):
    hours = rng.integers(0, 52_000, 128).astype(np.float32)
    return dense_params(rng, 32, 64, 1), {"hours": hours, "x": normal(rng, 128, 26), "y": normal(rng, 128, 1)}


def alibi(net, params, batch):
    """Attention with a bias linear in the distance (Press et al. 2022), 6 heads, as an outer product."""
    b, length, width = batch["x"].shape
    slopes = 2.0 ** (-8 * (jnp.arange(6) + 1) / 6)
    positions = jnp.arange(length)
    distances = (positions[:, None] - positions[None]).reshape(-1)
    bias = jnp.einsum("h,d->hd", slopes, distances).reshape(6, length, length)
    q, k, v = (net.dense(batch["x"], params[name]).reshape(b, length, 6, width // 6) for name in "qkv")
    scores = net.einsum("bqhd,bkhd->bhqk", q, k) / (width // 6) ** 0.5 - bias
    scores = jnp.where(positions[:, None] >= positions[None], scores, -1e9)
    out = net.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, length, width)
    return mean_square(out - batch["y"])


def alibi_data(rng):
    params = {name: normal(rng, 48, 48, scale=48**-0.5) for name in "qkv"}
    return params, {"x": normal(rng, 1, 256, 48), "y": normal(rng, 1, 256, 48)}


# Coordinates

CAPTURED = normal(np.random.default_rng(7), 2, 32, scale=10.0)


def fourier_features(where):
    """Random Fourier features (Tancik et al. 2020); `where` says what the matrix is to the program."""

    def loss(net, params, batch):
        matrix = {
            "data": lambda: batch["matrix"],
            "captured": lambda: CAPTURED,
            "made": lambda: 10 * jax.random.normal(jax.random.key(0), (2, 32), jnp.float32),
            "learned": lambda: params["matrix"],
        }[where]()
        angles = 2 * jnp.pi * batch["x"] @ matrix
        return mean_square(net.mlp(params, jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)) - batch["y"])

    return loss


def fourier_features_data(where):
    def data(rng):
        params = dense_params(rng, 64, 64, 3)
        batch = {"x": uniform(rng, 0, 1, 256, 2), "y": normal(rng, 256, 3)}
        if where in ("data", "learned"):
            (batch if where == "data" else params)["matrix"] = normal(rng, 2, 32, scale=10.0)
        return params, batch

    return data


def sine_network(net, params, batch):
    """A SIREN (Sitzmann et al. 2020): its first layer sees coordinates and multiplies by 30 what it makes of them."""
    first = jnp.sin(30 * (batch["x"] @ params["first"] + params["phase"]))
    return mean_square(net.mlp(params, first) - batch["y"])


def sine_network_data(rng):
    params = dense_params(rng, 64, 64, 1) | {"first": uniform(rng, -1, 1, 2, 64), "phase": uniform(rng, -1, 1, 64)}
    return params, {"x": uniform(rng, -1, 1, 256, 2), "y": normal(rng, 256, 1)}


def heat_equation(net, params, batch):
    """A physics-informed network: `u_t - u_xx / 20`, by derivatives of derivatives, and values at the border."""

    def u(point):
        return net.mlp(params, jnp.tanh(point @ params["first"] + params["shift"]))[0]

    def residual(point):
        return jax.grad(u)(point)[1] - 0.05 * jax.hessian(u)(point)[0, 0]

    border = jax.vmap(u)(batch["border"]) - jnp.sin(jnp.pi * batch["border"][:, 0])
    return mean_square(jax.vmap(residual)(batch["points"])) + mean_square(border)


def heat_equation_data(rng):
    params = dense_params(rng, 32, 32, 1) | {"first": normal(rng, 2, 32, scale=2.0), "shift": normal(rng, 32)}
    return params, {"points": uniform(rng, 0, 1, 64, 2), "border": uniform(rng, 0, 1, 32, 2)}


def spatial_transformer(net, params, batch):
    """A predicted 2 x 3 matrix times the pixels of a 512 x 512 image (Jaderberg et al. 2015), every eighth sampled."""
    small = jnp.tanh(net.conv(batch["image"][:, ::16, ::16], params["kernel"], stride=2))
    theta = jnp.eye(2, 3) + 0.05 * net.mlp(params, small.reshape(small.shape[0], -1)).reshape(-1, 2, 3)
    rows, columns = jnp.meshgrid(*2 * [jnp.linspace(-1, 1, 64)], indexing="ij")
    grid = jnp.stack([columns, rows, jnp.ones_like(rows)]).reshape(3, -1)
    x, y = jnp.moveaxis(256 * (theta @ grid + 1), 1, 0)
    sample = jax.vmap(lambda image, y, x: map_coordinates(image[..., 0], [y, x], order=1, mode="nearest"))
    return mean_square(sample(batch["image"], y, x) - batch["target"])


def spatial_transformer_data(rng):
    image = smooth_images(rng, 2, 512, 1)
    params = dense_params(rng, 16 * 16 * 4, 16, 6) | {"kernel": normal(rng, 3, 3, 1, 4, scale=0.3)}
    return params, {"image": image, "target": image[:, ::8, ::8, 0].reshape(2, -1)}


def bundle_adjustment(net, params, batch):
    """Corrected points seen by cameras: 3 x 4 matrices of about 1000 pixels, minus where they were seen, in pixels."""
    points = batch["points"] + 0.02 * net.mlp(params, batch["features"])
    homogeneous = jnp.concatenate([points, jnp.ones_like(points[:, :1])], axis=1)
    seen = jnp.einsum("kij,nj->kni", params["cameras"], homogeneous)
    return jnp.mean(jnp.sqrt(1 + jnp.sum((seen[..., :2] / seen[..., 2:] - batch["pixels"]) ** 2, -1)))


def bundle_adjustment_data(rng):
    points = uniform(rng, -2, 2, 200, 3) + np.array([0, 0, 8], np.float32)
    inner = np.array([[1000, 0, 640], [0, 1000, 360], [0, 0, 1]])
    outer = np.concatenate([np.tile(np.eye(3), (4, 1, 1)), rng.uniform(-1, 1, (4, 3, 1))], 2)
    cameras = np.einsum("ij,kjl->kil", inner, outer)
    seen = np.einsum("kij,nj->kni", cameras, np.concatenate([points, np.ones((200, 1))], 1))
    pixels = seen[..., :2] / seen[..., 2:] + 0.5 * rng.standard_normal((4, 200, 2))
    batch = {"points": points, "features": normal(rng, 200, 32), "pixels": pixels.astype(np.float32)}
    return dense_params(rng, 32, 32, 3) | {"cameras": cameras.astype(np.float32)}, batch


def rotation_of(q):
    """The rotation `[..., 3, 3]` of a quaternion `[..., 4]`."""
    w, x, y, z = jnp.moveaxis(q / jnp.sqrt(jnp.sum(q**2, -1, keepdims=True)), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)


def point_cloud(net, params, batch):
    """Registration: a rigid motion moves scanned points, tens of metres away, onto soft nearest neighbours."""
    moved = batch["source"] @ rotation_of(batch["turn"] + params["turn"] / 1000).T + params["shift"]
    away = jnp.sum((moved[:, None] - batch["target"]) ** 2, -1)
    learned = net.einsum("nd,md->nm", net.mlp(params, batch["source_features"]), batch["target_features"])
    weights = jax.nn.softmax(0.3 * learned - away)
    return jnp.mean(jnp.sum(weights * away, -1))


def point_cloud_data(rng):
    source = 40 + uniform(rng, -3, 3, 160, 3)
    features = normal(rng, 160, 16)
    target = source + normal(rng, 160, 3, scale=0.1)
    params = dense_params(rng, 16, 32, 16)
    params |= {"turn": normal(rng, 4), "shift": normal(rng, 3, scale=0.05)}
    return params, {
        "turn": np.array([1, 0, 0, 0], np.float32),
        "source": source,
        "target": target,
        "source_features": features,
        "target_features": features + normal(rng, 160, 16, scale=0.1),
    }


def protein_frames(net, params, batch):
    """Frame-aligned point error (Jumper et al. 2021): every atom, in Angstrom, seen from every predicted frame."""
    predicted = net.mlp(params, batch["features"])
    frames = rotation_of(batch["turn"] + 0.1 * predicted[:, :4])
    places = batch["places"] + 0.5 * predicted[:, 4:]
    seen = jnp.einsum("iab,ija->ijb", frames, places[None] - places[:, None])
    return jnp.mean(jnp.sqrt(1e-4 + jnp.sum((seen - batch["seen"]) ** 2, -1)))


def protein_frames_data(rng):
    turn, places = normal(rng, 64, 4), np.cumsum(normal(rng, 64, 3, scale=2.5), 0)
    seen = np.einsum("iab,ija->ijb", np.asarray(rotation_of(turn)), places[None] - places[:, None])
    batch = {"features": normal(rng, 64, 32), "turn": turn, "places": places, "seen": seen + normal(rng, 64, 64, 3)}
    return dense_params(rng, 32, 32, 7), batch


def robot_arm(net, params, batch):
    """Predicted angles of 12 joints, chained as 3 x 3 rotations in a scan: where the hand is, in millimetres."""
    angles = net.mlp(params, batch["x"]).T

    def joint(carry, inputs):
        turn, place = carry
        angle, offset, axis = inputs
        c, s, o, z = jnp.cos(angle), jnp.sin(angle), jnp.ones_like(angle), jnp.zeros_like(angle)
        upright = jnp.stack([c, -s, z, s, c, z, z, z, o], -1).reshape(-1, 3, 3)
        lying = jnp.stack([o, z, z, z, c, -s, z, s, c], -1).reshape(-1, 3, 3)
        turn = turn @ jnp.where(axis, upright, lying)
        return (turn, place + turn @ offset), None

    start = jnp.broadcast_to(jnp.eye(3), (angles.shape[1], 3, 3)), jnp.zeros((angles.shape[1], 3))
    (_, place), _ = jax.lax.scan(joint, start, (angles, params["offsets"], batch["axes"]))
    return mean_square((place - batch["goal"]) / 100)


def robot_arm_data(rng):
    batch = {"x": normal(rng, 64, 32), "axes": np.arange(12) % 2 == 0, "goal": uniform(rng, -500, 500, 64, 3)}
    return dense_params(rng, 32, 32, 12) | {"offsets": uniform(rng, 50, 150, 12, 3)}, batch


def two_links(net, params, batch):
    """Inverse kinematics of two links of 300 mm: a predicted pair of angles, its 2 x 2 rotations by `jnp.array`."""

    def hand(angles):
        def turn(a):
            return jnp.array([[jnp.cos(a), -jnp.sin(a)], [jnp.sin(a), jnp.cos(a)]])

        first = turn(angles[0])
        return first @ params["links"][0] + first @ turn(angles[1]) @ params["links"][1]

    angles = batch["angles"] + 0.05 * net.mlp(params, batch["goal"] / 300)
    return mean_square((jax.vmap(hand)(angles) - batch["goal"]) / 100)


def two_links_data(rng):
    angles = uniform(rng, 0.2, 2.5, 128, 2)
    one, two = angles[:, 0], angles.sum(1)
    goal = 300 * np.stack([np.cos(one) + np.cos(two), np.sin(one) + np.sin(two)], 1)
    links = np.array([[300, 0], [300, 0]], np.float32)
    return dense_params(rng, 2, 32, 2) | {"links": links}, {"angles": angles, "goal": goal.astype(np.float32)}


# States


def kalman_filter(net, params, batch):
    """A Kalman filter of position and velocity, scanned: its likelihood, by which noise and measurement are learned."""
    step = jnp.array([[1, 0, 0.1, 0], [0, 1, 0, 0.1], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    look = jnp.eye(2, 4)
    measured = batch["z"] + 0.3 * net.mlp(params, batch["features"])
    process, noise = jnp.diag(jnp.exp(params["process"])), jnp.diag(jnp.exp(params["noise"]))

    def filtered(carry, z):
        mean, cov = carry
        mean, cov = step @ mean, step @ cov @ step.T + process
        error, spread = z - look @ mean, look @ cov @ look.T + noise
        gain = jnp.linalg.solve(spread, look @ cov).T
        nll = error @ jnp.linalg.solve(spread, error) + jnp.log(jnp.linalg.det(spread))
        return (mean + gain @ error, cov - gain @ look @ cov), nll

    _, nll = jax.lax.scan(filtered, (jnp.zeros(4), 10 * jnp.eye(4)), measured)
    return jnp.mean(nll)


def kalman_filter_data(rng):
    speed = 3 + np.cumsum(normal(rng, 80, 2, scale=0.2), 0)
    z = 0.1 * np.cumsum(speed, 0) + normal(rng, 80, 2, scale=0.3)
    params = dense_params(rng, 32, 32, 2) | {
        "process": np.array([-5, -5, -3, -3], np.float32),
        "noise": np.array([-2, -2], np.float32),
    }
    return params, {"z": z.astype(np.float32), "features": normal(rng, 80, 32)}


def state_params(rng, n):
    """Parameters of an encoder to `n` states, and of a matrix that turns them and damps them slightly."""
    turn = np.linalg.qr(rng.standard_normal((n, n)))[0]
    return dense_params(rng, 32, 32, n) | {"step": (0.998 * turn).astype(np.float32)}


def state_data(n, steps):
    return lambda rng: (state_params(rng, n), {"x": normal(rng, 64, 32), "y": normal(rng, steps // 10, 64, n)})


def scanned_states(net, params, batch):
    """A linear system from an encoded start, scanned for ten steps for each that is compared."""
    step = lambda state, _: (state @ params["step"], None)  # noqa: E731
    block = jax.checkpoint(lambda state, _: 2 * (jax.lax.scan(step, state, None, 10)[0],))
    _, states = jax.lax.scan(block, net.mlp(params, batch["x"]), None, len(batch["y"]))
    return mean_square(states - batch["y"])


def looped_states(net, params, batch):
    """The same in a `fori_loop`, each state a vector: a matrix times it, under `vmap`."""

    def run(start):
        states = jnp.zeros((len(batch["y"]), start.shape[0]), start.dtype)

        def block(i, carry):
            state, states = carry
            state = jax.lax.fori_loop(0, 10, lambda _, state: params["step"] @ state, state)
            return state, states.at[i].set(state)

        return jax.lax.fori_loop(0, len(batch["y"]), block, (start, states))[1]

    states = jax.vmap(run, out_axes=1)(net.mlp(params, batch["x"]))
    return mean_square(states - batch["y"])


def matrix_exponential(net, params, batch):
    """A linear differential equation of 12 states, three seconds on, by `expm`."""
    return mean_square(net.mlp(params, batch["x"]) @ expm(3 * params["rate"]) - batch["y"])


def matrix_exponential_data(rng):
    skew = normal(rng, 12, 12)
    params = dense_params(rng, 32, 32, 12) | {"rate": skew - skew.T - 0.1 * np.eye(12, dtype=np.float32)}
    return params, {"x": normal(rng, 64, 32), "y": normal(rng, 64, 12)}


# Data meets a narrow operand


def barometers(net, params, batch):
    """Predicted weights of four barometers times their readings, about 101,325 Pa: an altitude in metres."""
    weights = jax.nn.softmax(net.mlp(params, batch["features"]))
    pressure = jnp.einsum("bk,bkt->bt", weights, batch["readings"])
    return mean_square((101325 - pressure) / 12 - batch["altitude"])


def barometers_data(rng):
    altitude = uniform(rng, 0, 50, 64, 8)
    readings = 101325 - 12 * altitude[:, None] + normal(rng, 64, 4, 8, scale=30.0)
    batch = {"features": normal(rng, 64, 32), "readings": readings.astype(np.float32), "altitude": altitude}
    return dense_params(rng, 32, 32, 4), batch


def colour_correction(net, params, batch):
    """A predicted 3 x 3 matrix times the linear light of a picture, compared in logarithms: shadows count."""
    matrix = jnp.eye(3) + 0.1 * net.mlp(params, batch["features"]).reshape(-1, 3, 3)
    light = jnp.einsum("bij,bhwj->bhwi", matrix, batch["light"])
    return mean_square(jnp.log(jnp.maximum(light, 0) + 1e-4) - batch["target"])


def colour_correction_data(rng):
    light = np.exp(2 * normal(rng, 8, 32, 32, 1) + 0.1 * normal(rng, 8, 32, 32, 3))
    batch = {"light": light, "features": normal(rng, 8, 32), "target": np.log(light + 1e-4)}
    return dense_params(rng, 32, 32, 9), batch


CASES = (
    Case("rotary_4096", 2, rotary(2, 64), rotary_data(4096, 32, 64)),
    Case("rotary_512", 2, rotary(2, 512), rotary_data(512, 32, 512, given=True)),
    Case(
        "rotary_scan",
        2,
        rotary(2, 192, scanned=True),
        rotary_data(192, 32, 192, layers=(3,), sharp=1.2),
        note="scan and remat",
    ),
    Case("position_table", 2, position_table, position_table_data),
    Case("time_embedding", 2, time_embedding, time_embedding_data),
    Case("calendar", 2, calendar, calendar_data),
    Case("alibi", 2, alibi, alibi_data),
    *(
        Case(f"fourier_features_{where}", 2, fourier_features(where), fourier_features_data(where))
        for where in ("data", "captured", "made", "learned")
    ),
    Case("sine_network", 2, sine_network, sine_network_data),
    Case("heat_equation", 2, heat_equation, heat_equation_data, note="third derivatives"),
    Case("spatial_transformer", 2, spatial_transformer, spatial_transformer_data),
    Case("bundle_adjustment", 2, bundle_adjustment, bundle_adjustment_data),
    Case("point_cloud", 2, point_cloud, point_cloud_data),
    Case("protein_frames", 2, protein_frames, protein_frames_data),
    Case("robot_arm", 2, robot_arm, robot_arm_data),
    Case("two_links", 2, two_links, two_links_data),
    Case("kalman_filter", 2, kalman_filter, kalman_filter_data),
    Case("states_4", 2, scanned_states, state_data(4, 100)),
    Case("states_6", 2, looped_states, state_data(6, 60)),
    Case("states_9", 2, scanned_states, state_data(9, 60)),
    Case("states_12", 2, matrix_exponential, matrix_exponential_data),
    Case("barometers", 2, barometers, barometers_data),
    Case("colour_correction", 2, colour_correction, colour_correction_data),
)
