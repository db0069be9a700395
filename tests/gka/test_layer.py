"""The layer: against a loop over heads in float64, under padding, masks and context, in other dtypes, compiled."""

import copy
import pickle

import pytest
import torch
from torch import nn

from gka import GaussianKernelAttention, GaussianMultiheadAttention, decode_attention, dispatch
from gka.masking import Mask
from gka.parts import rotary_tables
from sharding import check_trains_as_in_bfloat16, process_group

PADDED = {  # of sequences of 9 and 4 tokens; the last has a token of padding between them
    "none": None,
    "right": torch.tensor([[False] * 9, [False] * 4 + [True] * 5]),
    "left": torch.tensor([[False] * 9, [True] * 5 + [False] * 4]),
    "between": torch.tensor([[False] * 9, [True, False, True, True, False, False, True, True, False]]),
}
OPTIONS = [dict(), dict(head_norm=True), dict(channel_bandwidths=True), dict(head_offsets="NP")]
OPTIONS += [dict(head_norm=True, channel_bandwidths=True, head_offsets="ps")]
IN_CONTEXT = list(OPTIONS)  # what cross attention serves
OPTIONS += [dict(rotary=100.0), dict(head_norm=True, rotary=100.0), dict(head_gates=True), dict(preset="text")]


def table_of(options):
    return pytest.mark.parametrize("options", options, ids=lambda options: "+".join(options) or "paper")


options = table_of(OPTIONS)
padded = pytest.mark.parametrize("padded", PADDED)
EXACT, SINGLE = dict(rtol=1e-9, atol=1e-9), dict(rtol=1e-4, atol=1e-5)
close = torch.testing.assert_close


def layer_and_tokens(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = GaussianKernelAttention(24, 4, **options).to(dtype)
    with torch.no_grad():
        layer.log_sigma.copy_(torch.linspace(-1, 0.5, 4))
        if layer.log_scale is not None:
            layer.log_scale.copy_(torch.linspace(-0.5, 0.5, 24))
        for gate in (layer.head_gate, layer.ve_gate):
            if gate is not None:
                gate.weight.normal_()
    return layer, torch.randn(2, 9, 24, dtype=dtype, requires_grad=dtype == torch.float64)


def by_hand(layer, x, context, embedding=None, causal=False, window=None, holder=None):
    """Tokens of one sequence (T, dim) that look at those of the context, a head at a time, from docs/mathematics.md.

    embedding: (T, dim), the value embedding. holder: of a head's letter and a token, the token whose value it holds.
    """

    def norm(heads):
        return heads / heads.square().mean(-1, keepdim=True).sqrt() if layer.head_norm else heads

    def turned(heads):
        """By minus position * theta^(-2c / D), where channels c and c + D / 2 are a complex number."""
        rates = torch.tensor([layer.rotary ** (-c / 3) for c in range(3)], dtype=torch.float64)
        angles = torch.arange(len(heads))[:, None, None] * rates
        pairs = torch.complex(heads[..., :3], heads[..., 3:]) * torch.exp(-1j * angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1).to(heads.dtype)

    def features_and_values(tokens):
        values = features = norm(tokens.view(len(tokens), 4, 6))
        if layer.log_scale is not None:
            features = features * layer.log_scale.exp().view(4, 6)
        return norm(turned(features) if layer.rotary else features), values

    (queries, _), (keys, values) = features_and_values(x), features_and_values(context)
    if embedding is not None:
        gates = 2 / (1 + torch.exp(-x @ layer.ve_gate.weight.T))
        values = values + gates[..., None] * embedding.view(len(x), 4, 6)
    before, letters, mixed = [max(0, token - 1) for token in range(len(context))], layer.head_offsets.upper() or "N", []
    for head in range(4):
        letter, k, v = letters[head % len(letters)], keys[:, head], values[:, head]
        k, v = k[before] if letter == "S" else k, v[before] if letter == "P" else v
        v = v if holder is None else v[[holder(layer.spatial_offsets[head], token) for token in range(len(x))]]
        apart = (queries[:, None, head] - k).square().sum(-1)
        kernel = torch.exp(-apart / (2 * layer.log_sigma[head].exp() ** 2))
        kernel = kernel * Mask(causal, window).dense(len(x), len(context), x.device)
        y = kernel / kernel.sum(-1, keepdim=True) @ v
        if layer.head_gate is not None:
            y = y * (2 / (1 + torch.exp(-0.1 * x @ layer.head_gate.weight[head])))[:, None]
        mixed.append(y)
    return layer.proj(torch.cat(mixed, dim=-1))


def with_garbage(t, hidden, bad):
    """A leaf with that number in hidden tokens."""
    return t.detach().masked_fill(hidden[..., None], bad).requires_grad_()


@pytest.mark.parametrize("causal,window", [(True, None), (False, None), (True, 2), (False, 1)])
@padded
@table_of([*OPTIONS, dict(value_embeddings=True), dict(preset="text", value_embeddings=True)])
def test_the_layer_is_its_definition_with_padding_too(options, padded, causal, window):
    """Outputs and all gradients; NaN and infinity in padding reach nothing."""
    layer, x = layer_and_tokens(causal=causal, window=window, **options)
    embeddings = [torch.randn_like(x, requires_grad=True)] * layer.value_embeddings
    hidden = torch.zeros(2, 9, dtype=torch.bool) if PADDED[padded] is None else PADDED[padded]
    tokens, *given = (with_garbage(t, hidden, torch.inf if causal else torch.nan) for t in (x, *embeddings))
    call = dict(value_embedding=given[0]) if given else {}
    y, weights = layer(tokens, key_padding_mask=PADDED[padded], need_weights=True, **call)
    rows = [[t[row][~mask] for t in (x, x, *embeddings)] for row, mask in enumerate(hidden)]
    want = torch.cat([by_hand(layer, *row, causal=causal, window=window) for row in rows])
    learned = list(layer.parameters())
    losses = (y[~hidden].square().sum(), [tokens, *given, *learned]), (want.square().sum(), [x, *embeddings, *learned])
    close(y[~hidden], want, **EXACT)
    close(*(torch.autograd.grad(*loss) for loss in losses), **EXACT)
    close(y[hidden], layer.proj(torch.zeros(int(hidden.sum()), 24, dtype=torch.float64)))
    rows = weights.sum(-1).transpose(1, 2)
    close(rows[~hidden], torch.ones_like(rows[~hidden]), rtol=1e-5, atol=1e-5)
    assert not rows[hidden].any() and not weights.transpose(1, 3)[hidden].any()  # no query reads a hidden slot


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@padded
@table_of(IN_CONTEXT)
def test_context_is_looked_at_and_its_padding_is_not(options, padded, bad):
    layer, x = layer_and_tokens(**options)
    context = torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    hidden = torch.zeros(2, 9, dtype=torch.bool) if PADDED[padded] is None else PADDED[padded]
    tokens = with_garbage(context, hidden, bad)
    y, weights = layer(x[:, :5], tokens, key_padding_mask=PADDED[padded], need_weights=True)
    want = torch.stack([by_hand(layer, row, t[~mask]) for row, t, mask in zip(x[:, :5], context, hidden)])
    learned = [x, *layer.parameters()]
    losses = (y.square().sum(), [tokens, *learned]), (want.square().sum(), [context, *learned])
    close(y, want, **EXACT)
    close(*(torch.autograd.grad(*loss) for loss in losses), **EXACT)
    assert weights.shape == (2, 4, 5, 9) and not weights.transpose(1, 3)[hidden].any()
    if layer.pairing is not None and PADDED[padded] is not None:
        with pytest.raises(ValueError, match="padded context need a layer that is not causal"):
            layer(x, tokens, key_padding_mask=hidden, is_causal=True)


@padded
@options
def test_a_mask_of_ones_own_goes_with_the_tokens_that_are_packed(options, padded):
    """That says what `causal` says: places are not changed."""
    layer, x = layer_and_tokens(causal=True, **options)
    masked, _ = layer_and_tokens(**options)
    earlier = torch.ones(9, 9, dtype=torch.bool).tril()
    want = layer(x, key_padding_mask=PADDED[padded], need_weights=True)
    for mask in (earlier, torch.zeros(2, 1, 9, 9).masked_fill(~earlier, -torch.inf)):
        got = masked(x, key_padding_mask=PADDED[padded], attn_mask=mask, need_weights=True)
        close(got, want, rtol=1e-5, atol=1e-5)


SIDES = {"L": (0, -1), "R": (0, 1), "U": (-1, 0), "B": (1, 0), "D": (-1, -1), "N": (0, 0)}  # row, column


@pytest.mark.parametrize("options", [
    dict(preset="image"), dict(preset="image", head_norm=True, channel_bandwidths=True, head_gates=True, window=4),
    dict(spatial_offsets="ndl", value_embeddings=True),
], ids=lambda options: "+".join(options))  # fmt: skip
@pytest.mark.parametrize("grid,prefix", [(None, 1), ((3, 5), 0), ((5, 3), 2), ((1, 4), 1)])
def test_spatial_offsets_are_their_definition(options, grid, prefix):
    """Outputs and all gradients."""
    layer, _ = layer_and_tokens(**options)
    rows, columns = grid or (3, 3)

    def holder(letter, token):
        (row, column), (down, right) = divmod(token - prefix, columns), SIDES[letter]
        inside = 0 <= row + down < rows and 0 <= column + right < columns
        return token + down * columns + right if token >= prefix and inside else token

    layer.spatial_offsets *= 4  # `by_hand` has a letter for every head
    x, embedding = torch.randn(2, 2, prefix + rows * columns, 24, dtype=torch.float64).requires_grad_().unbind()
    embedding = embedding if layer.value_embeddings else None
    call = dict(grid=grid, **dict(prefix=prefix) if prefix != 1 else {}, value_embedding=embedding)
    y, weights = layer(x, need_weights=True, **call)
    parts = [[x[row], x[row], None if embedding is None else embedding[row]] for row in range(2)]
    want = torch.stack([by_hand(layer, *part, window=layer.window, holder=holder) for part in parts])
    leaves = [t for t in (x, embedding, *layer.parameters()) if t is not None]
    close(y, want, **EXACT)
    close(*(torch.autograd.grad(result.square().sum(), leaves) for result in (y, want)), **EXACT)
    close(weights.sum(-1), torch.ones_like(weights.sum(-1)), rtol=1e-5, atol=1e-5)


def test_a_small_image_on_a_padded_grid_is_as_if_it_were_alone():
    layer, _ = layer_and_tokens(preset="image", head_norm=True)
    image, grid = torch.randn(1, 1 + 2 * 3, 24, dtype=torch.float64), torch.full((1, 4, 5, 24), torch.nan).double()
    grid[:, 1:3, 1:4] = image[:, 1:].unflatten(1, (2, 3))
    x = torch.cat([image[:, :1], grid.flatten(1, 2)], dim=1).requires_grad_()
    hidden = x.isnan().all(-1)
    y, alone = layer(x, key_padding_mask=hidden, grid=(4, 5)), layer(image, grid=(2, 3))
    close(y[~hidden], alone[0], **EXACT)
    losses = y[~hidden].square().sum(), alone.square().sum()
    close(*(torch.autograd.grad(loss, list(layer.parameters())) for loss in losses), **EXACT)


@pytest.mark.parametrize("tables", [False, True])
def test_the_last_token_is_what_decode_attention_makes_of_the_cached_features_and_values(tables):
    """Of the tokens before and of its own at its position; with tables of values alone too."""
    turns = rotary_tables(torch.arange(9, dtype=torch.float64), 6) if tables else 10_000.0
    layer, x = layer_and_tokens(preset="text", causal=True, window=6, rotary=turns)
    (features, values), last = layer.features_and_values(x[:, :-1]), x[:, -1:]
    query, value = layer.features_and_values(last, positions=torch.tensor([8]))
    values = torch.cat([values, value], dim=1)
    caches = [dict(keys=torch.cat([features, query], dim=1))]
    caches += [dict(rotary=turns, channel_scales=layer.log_scale.exp().view(4, 6).float())] * tables
    delays = dict(key_delays=layer.pairing.key_delays, value_delays=layer.pairing.value_delays)
    for cache in caches:
        y = decode_attention(query, layer.log_sigma.float(), values, window=6, constant_norm=True, **delays, **cache)
        close(layer.proj(layer.gated(y, last).flatten(-2)), layer(x)[:, -1:], rtol=1e-5, atol=1e-5)


def test_a_padded_causal_layer_with_offsets_takes_the_fused_kernel_compiled_too(monkeypatch):
    """Where no token sees padding nothing is hidden but by the causal mask, which every kernel serves."""
    layer, x = layer_and_tokens(torch.float32, causal=True, head_norm=True, head_offsets="PS")
    taken, choose = [], dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *arguments: taken.append(choose(*arguments)) or taken[-1])
    fused = layer.chosen_impl(9)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    outputs = [layer(x, key_padding_mask=padding) for padding in PADDED.values()]
    assert taken == [fused] * len(PADDED)
    for padding, y in zip(PADDED.values(), outputs):
        close(compiled(x, key_padding_mask=padding), y)


@pytest.mark.parametrize("head_offsets", ["", "PS"])
def test_a_trace_made_with_padding_on_the_right_serves_padding_elsewhere(head_offsets):
    layer, x = layer_and_tokens(torch.float32, causal=True, head_offsets=head_offsets)
    layer.requires_grad_(False)  # parameters are constants of the trace
    traced = torch.jit.trace(lambda x, padding: layer(x, key_padding_mask=padding), (x, PADDED["right"]))
    for padding in (PADDED["left"], PADDED["between"]):
        close(traced(x, padding), layer(x, key_padding_mask=padding))


@options
def test_in_float32_by_the_fused_kernel_and_traced_by_fx(options):
    """One graph for all lengths and batches."""
    layer, x = layer_and_tokens(torch.float32, causal=True, window=3, **options)
    close(layer(x), torch.stack([by_hand(layer, row, row, causal=True, window=3) for row in x]), **SINGLE)
    model = nn.Sequential(nn.LayerNorm(24), layer, nn.Linear(24, 5))
    graph = torch.fx.symbolic_trace(model)
    for each in (x, x[:1, :4]):
        assert torch.equal(graph(each), model(each))
    assert all(f"{name}={value}" in repr(layer) for name, value in options.items() if name != "preset")


@pytest.mark.parametrize("settings,error,message", [
    (dict(head_offsets="PX"), ValueError, "head_offsets must be made of the letters N, P, S"),
    (dict(head_offsets=3), ValueError, "head_offsets must be made of the letters N, P, S"),
    (dict(head_offsets="PSNNS"), ValueError, "head_offsets PSNNS has 5 letters but there are 4 heads"),
    (dict(preset="texts"), ValueError, "preset must be text, image or None"),
    (dict(spatial_offsets="LX"), ValueError, "spatial_offsets must be letters of N, L, R, U, B, D"),
    (dict(num_heads=3, preset="image"), ValueError, "spatial_offsets LRUB has 4 letters but there are 3 heads"),
    (dict(preset="image", causal=True), ValueError, "spatial_offsets.* do not go with causal"),
    (dict(preset="image", head_offsets="PS"), ValueError, "do not go with causal attention, head_offsets"),
    (dict(preset="image", rotary=1e4), ValueError, "spatial_offsets.* do not go with causal attention, .* rotary"),
    (dict(preset="text", num_heads=8), ValueError, "rotary needs an even head_dim, .* got 3"),
    (dict(rotary=True), TypeError, "rotary must be theta, a number, or tables"),
    (dict(rotary=-1), ValueError, "theta, must be positive"),
    (dict(rotary=(torch.ones(9, 3), torch.ones(8, 3))), ValueError, "rotary must be two tables of .length, 3."),
], ids=str)  # fmt: skip
def test_wrong_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        GaussianKernelAttention(24, **{"num_heads": 4, **settings})


X, MASKED = torch.ones(2, 10, 24), torch.zeros(2, 10, dtype=torch.bool)


@pytest.mark.parametrize("settings,call,error,message", [
    (dict(head_offsets="PS"), dict(key_padding_mask=MASKED[:, 1:]), ValueError, "key_padding_mask must have shape"),
    (dict(preset="text"), dict(context=X), ValueError, "rotary, head_gates is for self-attention"),
    (dict(preset="image"), dict(context=X), ValueError, "spatial_offsets is for self-attention"),
    (dict(value_embeddings=True), dict(context=X, value_embedding=X), ValueError, "value_embeddings is for self-"),
    (dict(value_embeddings=True), dict(), ValueError, "value_embedding is needed"),
    (dict(), dict(value_embedding=X), ValueError, "value_embedding is for layers with value_embeddings=True"),
    (dict(value_embeddings=True), dict(value_embedding=X[:, 1:]), ValueError, "value_embedding must have the shape"),
    (dict(preset="text", value_embeddings=True), dict(value_embedding=X[1:], key_padding_mask=MASKED), ValueError,
     "value_embedding must have the shape of x"),
    (dict(value_embeddings=True), dict(value_embedding=X.double()), TypeError, "value_embedding must have the dtype"),
    (dict(preset="image"), dict(is_causal=True), ValueError, "spatial_offsets.* do not go with causal"),
    (dict(preset="image"), dict(prefix=0), ValueError, "10 tokens without the first 0 are no square"),
    (dict(preset="image"), dict(grid=(2, 5)), ValueError, "need 1 tokens and 2 x 5 patches, got 10 tokens"),
    (dict(), dict(grid=(2, 5)), ValueError, "grid is for layers with spatial_offsets"),
    (dict(rotary=(torch.ones(9, 3), torch.ones(9, 3))), dict(), ValueError, "tables of 9 positions, .* 10 tokens"),
], ids=str)  # fmt: skip
def test_wrong_calls_are_refused(settings, call, error, message):
    with pytest.raises(error, match=message):
        GaussianKernelAttention(24, 4, **settings)(X, **call)


@pytest.mark.parametrize("options", [dict(), dict(head_norm=True, causal=True, window=3)], ids=str)
def test_layer_under_fsdp_in_bfloat16(options, tmp_path):
    model, x = nn.Sequential(GaussianKernelAttention(32, 2, **options)), torch.randn(2, 9, 32).bfloat16()
    with process_group(tmp_path):
        check_trains_as_in_bfloat16(model, lambda m: m, lambda m: m(x).float().square().sum())


def test_layer_under_autocast():
    """It takes inputs of any dtype but float64, which autocast does not cast either."""
    layer, x = GaussianKernelAttention(32, 2), torch.randn(2, 9, 32)
    multihead = GaussianMultiheadAttention(32, 2)
    multihead.load_state_dict({name.replace("proj", "out_proj"): t for name, t in layer.state_dict().items()})
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tokens = x.to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = layer(tokens), layer(tokens, x)[:1], multihead(*[tokens.transpose(0, 1)] * 3)[0].transpose(0, 1)
        for y in outputs:
            assert y.dtype == torch.bfloat16
            close(y.float(), layer(x)[: len(y)], rtol=0.04, atol=0.04)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="x must have the dtype of the layer's"):
        layer(x.double())


def test_layer_takes_what_its_projection_casts_by_itself():
    """Such as a quantised one."""

    class Stored(nn.Linear):
        """Multiplies in the dtype of what it gets."""

        def __init__(self, linear):
            super().__init__(32, 32)
            del self.weight
            self.weight, self.bias = linear.weight.detach().bfloat16(), linear.bias

        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)

    layer, x = GaussianKernelAttention(32, 2), torch.randn(2, 9, 32)
    want = layer(x)
    layer.proj = Stored(layer.proj)
    close(layer(x), want, rtol=0.01, atol=0.01)


def test_layer_compiled_exported_and_mapped_with_context():
    """One graph each, in spite of what the door checks."""
    layer, x, context = GaussianKernelAttention(32, 2), torch.randn(2, 9, 32), torch.randn(2, 4, 32)
    want = layer(x, context)
    concrete = dict(key_padding_mask=None, attn_mask=None, is_causal=False, need_weights=False)
    concrete |= dict(value_embedding=None, grid=None, prefix=1)
    for same in (
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        torch.export.export(layer, (x, context)).module(),
        torch.fx.symbolic_trace(layer, concrete_args=concrete),
        torch.func.vmap(lambda x, c: layer(x[None], c[None])[0]),
        lambda *inputs: torch.func.functional_call(layer, dict(layer.named_parameters()), inputs),
    ):
        close(same(x, context), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_offsets", ["", "PS"])
def test_an_exported_layer_with_a_window_takes_two_tokens_more_than_that_and_longer_texts(head_offsets):
    layer = layer_and_tokens(torch.float32, causal=True, window=20, head_offsets=head_offsets)[0]
    shapes = ({1: torch.export.Dim("tokens", min=22, max=512)},)
    program = torch.export.export(layer, (torch.randn(2, 40, 24),), dynamic_shapes=shapes).module()
    for x in (torch.randn(2, 22, 24), torch.randn(2, 50, 24)):
        close(program(x), layer(x), **SINGLE)


TURNS = rotary_tables(torch.arange(9.0), 8)


@pytest.mark.parametrize("options", [
    dict(sigma_squared=5.0, channel_bandwidths=True), dict(preset="text"), dict(preset="image", value_embeddings=True),
    dict(preset="text", rotary=TURNS),
], ids=lambda options: "+".join(options))  # fmt: skip
def test_layer_survives_the_meta_device_and_copies(options):
    """What is not drawn is as in a new layer, and tables move with it."""
    torch.manual_seed(1)
    new = GaussianKernelAttention(32, 4, **options)
    with torch.device("meta"):
        layer = GaussianKernelAttention(32, 4, **options)
    layer = layer.to_empty(device="cpu")
    for t in (*layer.parameters(), *layer.buffers()):
        t.data.fill_(torch.nan)
    layer.reset_parameters()
    x = torch.randn(1, 9, 32)
    call = dict(value_embedding=x, prefix=0) if layer.value_embeddings else {}
    layer.proj.load_state_dict(new.proj.state_dict())
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x, **call), new(x, **call))
    assert {buffer.dtype for buffer in layer.bfloat16().buffers()} <= {torch.bfloat16}
    assert layer.state_dict().keys() == {name for name, _ in layer.named_parameters()}


def test_what_is_given_wins_over_a_preset_and_without_one_nothing_is_drawn_but_the_projection():
    layer = GaussianKernelAttention(32, 4, preset="text", bias=True, sigma_squared=3.0, rotary=False, head_offsets="")
    assert layer.proj.bias is not None and layer.sigma_squared == 3.0 and layer.rotary is layer.pairing is None
    assert layer.head_norm and layer.channel_bandwidths and layer.head_gates and not layer.value_embeddings
    assert GaussianKernelAttention(32, 4, preset="text").sigma_squared == 8 / 4
    torch.manual_seed(0)
    layer, after = GaussianKernelAttention(32, 4), torch.rand(())
    torch.manual_seed(0)
    projection = nn.Linear(32, 32)
    assert torch.equal(layer.proj.weight, projection.weight) and torch.equal(torch.rand(()), after)
    assert layer.sigma_squared == 8**0.5 and dict(layer.named_parameters()).keys() == {
        "log_sigma", "proj.weight", "proj.bias",
    }  # fmt: skip
