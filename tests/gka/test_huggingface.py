"""Gaussian kernel attention in transformers' own BERT, ViT and Llama: padding, training, generation, saving."""

import copy
from functools import partial

import pytest
import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from gka import GaussianKernelAttention, gaussian_attention
from gka.huggingface import use_gka
from gka.parts import rotary_tables
from operator_cases import filled

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50)
LENGTHS = torch.tensor([9, 4, 1])
MASK = (torch.arange(9) < LENGTHS[:, None]).long()
FORMS = pytest.mark.parametrize("preset", [None, "text"], ids=str)


def bert(preset=None, seed=0, **options):
    torch.manual_seed(seed)
    config = transformers.BertConfig(**SIZES, num_labels=3, hidden_dropout_prob=0.0)
    return filled(use_gka(transformers.BertForSequenceClassification(config), preset=preset, **options))


def vit(preset=None, seed=0, **options):
    torch.manual_seed(seed)
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=(16, 24), patch_size=4, num_labels=3)
    return filled(use_gka(transformers.ViTForImageClassification(config), preset=preset, **options))


def llama(preset=None, kind="Llama", seed=0, **sizes):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return filled(use_gka(getattr(transformers, f"{kind}ForCausalLM")(config), preset=preset)).eval()


def ids(seed=0):
    return torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(seed))


@FORMS
def test_padding_ids_do_not_move_real_tokens(preset):
    model, tokens = bert(preset).bert.eval(), ids()
    other = torch.where(MASK == 1, tokens, ids(1))
    y, again = (model(t, attention_mask=MASK).last_hidden_state for t in (tokens, other))
    assert torch.equal(y[MASK == 1], again[MASK == 1])
    for row, length in enumerate(LENGTHS):
        alone = model(tokens[row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(y[row, :length], alone, rtol=1e-4, atol=1e-5)


def test_trainer_trains_it(tmp_path):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, number):
            label, length = number % 3, 2 + number % 7
            row = torch.full((9,), 0)
            row[:length] = 10 + label
            return dict(input_ids=row, attention_mask=(torch.arange(9) < length).long(), labels=torch.tensor(label))

    model = bert("text")
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=12, learning_rate=3e-3, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=Rows())
    trainer.train()
    assert trainer.evaluate(Rows())["eval_loss"] < 0.3  # chance is log 3 = 1.1


@pytest.mark.parametrize("build, preset", [(bert, "text"), (vit, "image"), (llama, "text")])
def test_what_is_saved_loads(build, preset, tmp_path):
    model, again = build(preset).eval(), build(preset, seed=1).eval()
    model.save_pretrained(tmp_path)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    inputs = torch.randn(3, 3, 16, 24) if build is vit else ids()
    for same in (again, copy.deepcopy(again)):
        assert torch.equal(same(inputs).logits, model(inputs).logits)


@pytest.mark.parametrize("build, preset, named", [
    (bert, None, {}), (bert, "text", {}), (vit, "image", dict(grid=(4, 6))),
    (partial(llama, num_key_value_heads=2), "text", {}),
])  # fmt: skip
def test_a_preset_is_that_of_the_layer(build, preset, named):
    """In outputs and the gradients of what is learned, which are all parameters that are left but W_O. Without rotary
    positions in models that do not rotate, and with Llama's, which turn the other way.
    """
    model, seen, rotates = build(preset).eval(), {}, build not in (bert, vit)
    layer = [part for part in model.modules() if hasattr(part, "log_sigma")][1]
    layer.o_proj = nn.Identity()
    layer.register_forward_pre_hook(
        lambda _, given, named: seen.update(x=given[0] if given else named["hidden_states"]), with_kwargs=True
    )
    layer.register_forward_hook(lambda _, __, result: seen.update(y=result[0]))
    model(torch.randn(3, 3, 16, 24) if build is vit else ids())
    cos, sin = rotary_tables(torch.arange(9.0), 8)
    options = dict(rotary=(cos, -sin), causal=True) if rotates else dict(rotary=False)
    want = GaussianKernelAttention(32, 4, preset=preset, bias=False, **options)
    nn.init.eye_(want.proj.weight)
    assert want.load_state_dict(layer.state_dict(), strict=False) == (["proj.weight"], [])
    results = []
    for attention, y in ((layer, seen["y"].flatten(2)), (want, want(seen["x"], **named))):
        learned = {name: p for name, p in attention.named_parameters() if name != "proj.weight"}
        gradients = torch.autograd.grad(y.square().sum(), list(learned.values()), retain_graph=True)
        results.append(dict(zip(learned, gradients), y=y))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((2 * layer.log_sigma).exp(), torch.full((4,), 8 / 4 if preset == "text" else 8**0.5))


@FORMS
def test_a_decoder_is_causal_and_its_cache_agrees_with_whole_passes(preset):
    model, tokens = llama(preset), ids()
    logits = model(tokens).logits
    later = tokens.clone()
    later[:, 6:] = ids(1)[:, 6:]
    torch.testing.assert_close(model(later).logits[:, :6], logits[:, :6], rtol=1e-4, atol=1e-5)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in tokens.split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits, rtol=1e-4, atol=1e-4)


def test_a_compiled_decoder_is_one_graph():
    model, tokens = llama("text"), ids()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits)


def continued(model, rows, **options):
    tokens, options = torch.as_tensor(rows), dict(max_new_tokens=5, do_sample=False, eos_token_id=None, **options)
    return model.generate(input_ids=tokens, attention_mask=(tokens > 0).long(), **options)[:, -5:]


@FORMS
def test_generation_with_padding_on_the_left_is_that_of_each_prompt(preset):
    """Drafted by the first layer, and without a cache, too."""
    model, prompts = llama(preset), [[5, 6, 7, 8], [9, 10]]
    together = continued(model, [[5, 6, 7, 8], [0, 0, 9, 10]])
    for options in ({}, dict(assistant_early_exit=1), dict(use_cache=False)):
        assert torch.equal(together, torch.cat([continued(model, [prompt], **options) for prompt in prompts]))


def test_padded_generation_behind_virtual_tokens_is_served_without_a_cache():
    """With one, PEFT's masks do not count them from the second step on."""
    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    rows = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    with pytest.raises(ValueError, match="use_cache=False"):
        continued(model, rows)
    rows = torch.cat([rows, continued(model, rows, use_cache=False)], dim=1)
    logits = model(input_ids=rows[:, :-1], attention_mask=(rows[:, :-1] > 0).long()).logits
    assert torch.equal(logits[:, -5:].argmax(-1), rows[:, -5:])


def test_what_it_cannot_change_is_named():
    wide = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, head_dim=16))
    for model, reason in [
        (wide, "layers.0.self_attn: the heads together must be as wide as the model"),
        (nn.Linear(3, 3), "takes a model of transformers, got Linear"),
        (bert(), "another kind, or has GKA already"),
    ]:
        with pytest.raises(ValueError, match=reason):
            use_gka(model)
    with pytest.raises(TypeError, match="got rotary"):
        use_gka(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), rotary=10.0)
    model = llama()
    with pytest.raises(ValueError, match="use the dynamic cache"):
        model(ids(), past_key_values=transformers.StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(ValueError, match="4 x 6 patches with one token before them, or none, got 17 tokens"):
        next(part for part in vit("image").modules() if hasattr(part, "log_sigma"))(torch.randn(1, 17, 32))
    with pytest.raises(ValueError, match=r"attention_mask as \(B, T\)"):
        bert("text")(ids(), attention_mask=torch.zeros(3, 1, 9, 9))


def test_offsets_in_windows_are_served_by_a_cache_of_all_tokens():
    model, tokens = llama("text", "Mistral", sliding_window=4), ids()
    want = model(tokens).logits
    for cache, length in ((transformers.DynamicCache(), 9), (transformers.DynamicCache(config=model.config), 4)):
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in tokens[:, :length].split(1, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), want[:, :length], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"DynamicCache\(\)"):
        model(tokens[:, 4:5], past_key_values=cache)


def test_a_model_that_is_refused_stays_as_it_was():
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    y = model(ids()).last_hidden_state
    wider = transformers.BertModel(transformers.BertConfig(**SIZES))
    wider.encoder.layer[1].attention.self.query = nn.Linear(32, 16)
    for refused, options, reason in [
        (wider, {}, "as wide as the model"),
        (model, dict(sigma_squared=0.0), "sigma_squared"),
        (model, dict(preset="texts"), "preset"),
        (model, dict(preset="image"), "image_size"),
        (model, dict(preset="text", head_offsets="X"), "head_offsets"),
        (model, dict(spatial_offsets="LRUBD"), "5 letters but there are 4 heads"),
        (model, dict(head_offsets="P", spatial_offsets="L"), "take one"),
    ]:
        names = [name for name, _ in refused.named_parameters()]
        with pytest.raises(ValueError, match=reason):
            use_gka(refused, **options)
        assert names == [name for name, _ in refused.named_parameters()]
        assert refused.config._attn_implementation != "gka"
    assert torch.equal(model(ids()).last_hidden_state, y)


@FORMS
def test_cross_attention_reads_the_encoder_and_every_part_is_changed(preset):
    """In the paper's form, whatever the preset is."""
    torch.manual_seed(0)
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=50)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=2)
    model = filled(use_gka(transformers.BartModel(transformers.BartConfig(**sizes, **heads)), preset=preset)).eval()
    layer, x, encoded = model.decoder.layers[0].encoder_attn, torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    queries, keys = (t.unflatten(-1, (2, 16)) for t in (x, encoded))
    want = layer.out_proj(gaussian_attention(queries, layer.log_sigma, keys=keys).flatten(2))
    torch.testing.assert_close(layer(x, encoded)[0], want, rtol=1e-5, atol=1e-6)
    config = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    plain = transformers.BertModel(transformers.BertConfig(**SIZES))
    both = transformers.EncoderDecoderModel(encoder=plain, decoder=transformers.BertLMHeadModel(config))
    use_gka(both, preset=preset)(
        input_ids=ids(), attention_mask=MASK, decoder_input_ids=ids(1)
    ).logits.square().mean().backward()
    sigmas = [p for name, p in both.named_parameters() if name.endswith("log_sigma")]
    assert len(sigmas) == 6 and all(p.grad is not None and p.grad.any() for p in sigmas)
