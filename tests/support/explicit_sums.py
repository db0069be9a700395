"""The operator and its derivatives in NumPy, one scalar sum at a time, with nothing in common with the code under test.

Everything here is analytic in its arguments, so a step of 1e-30 i differentiates it to the last digit (complex-step
method): `tangent` gives y's directional derivative, `curvature` that of the gradient, a Hessian-vector product.
"""

import numpy as np

STEP = 1e-30


def attend(x, keys, values, log_sigma, causal, eps, grad_y, window=None):
    """(y, gradients of sum grad_y y by x, keys, values and log_sigma), arrays (B, T, H, D).

    Paper eq. 3, 4 and 7, and docs/mathematics.md, Gradients.
    """
    y, dx, dkeys, dvalues, dlog_sigma = (np.zeros_like(t) for t in (x, x, keys, values, log_sigma))
    batch, num_queries, heads, _ = x.shape
    for b, h, i in np.ndindex(batch, heads, num_queries):
        place, reach = i + keys.shape[1] - num_queries, keys.shape[1] if window is None else window
        seen = [j for j in range(keys.shape[1]) if -reach <= j - place <= (0 if causal else reach)]
        squared_sigma = np.exp(2 * log_sigma[h])
        exponent = [-((x[b, i, h] - keys[b, j, h]) ** 2).sum() / (2 * squared_sigma) for j in seen]
        total = sum(np.exp(s) for s in exponent) + eps
        weight = [np.exp(s) / total for s in exponent]
        y[b, i, h] = sum(weight[n] * values[b, j, h] for n, j in enumerate(seen))
        for n, j in enumerate(seen):
            pull = weight[n] * (grad_y[b, i, h] * (values[b, j, h] - y[b, i, h])).sum()
            dx[b, i, h] += pull * (keys[b, j, h] - x[b, i, h]) / squared_sigma
            dkeys[b, j, h] += pull * (x[b, i, h] - keys[b, j, h]) / squared_sigma
            dvalues[b, j, h] += weight[n] * grad_y[b, i, h]
            dlog_sigma[h] += -2 * pull * exponent[n]
    return y, (dx, dkeys, dvalues, dlog_sigma)


def _step(tensors, directions):
    return [t.astype(complex) + 1j * STEP * d for t, d in zip(tensors, directions, strict=True)]


def tangent(tensors, directions, causal, eps):
    """d/dt y(tensors + t directions) at t = 0; tensors are x, keys, values and log_sigma."""
    return attend(*_step(tensors, directions), causal, eps, np.zeros_like(tensors[0]))[0].imag / STEP


def gradients(tensors, causal, eps, grad_y):
    return attend(*tensors, causal, eps, grad_y)[1]


def curvature(tensors, directions, causal, eps, grad_y):
    """d/dt of the gradients at tensors + t directions: the Hessian of sum grad_y y times the directions."""
    return [t.imag / STEP for t in attend(*_step(tensors, directions), causal, eps, grad_y)[1]]
