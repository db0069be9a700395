"""What must hold of a language model whatever its attention is: causality, learning, caches, what its memory is."""

import torch

from nanochat_gka.core_metric.prompt_tree import PromptTree
from nanochat_gka.model.accounting import parameter_counts
from nanochat_gka.model.gpt import GPT
from nanochat_gka.training import memory
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from trainkit_gka.distributed import Runtime

TOKENS = 40  # beyond the short window (8) of `tiny_gpt.SHAPE`, the context (16) and one more
# float32: a logit is a sum over 64 channels of unit size, capped at 20; four layers add their roundings.
LOGITS = dict(rtol=0, atol=1e-5)
PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 8, 7, 6], [1, 2, 3, 4, 5, 11, 12, 13], [1, 2, 3]]


def later_tokens_change_nothing(model: GPT) -> None:
    ids = torch.randint(70, (2, 16))
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 70
    assert torch.equal(model(ids)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(ids)[:, 9:], model(changed)[:, 9:])


def every_parameter_learns(model: GPT) -> None:
    """And is of one group of the optimiser, and counted before the model is built."""
    ids = torch.randint(70, (2, 17))
    model(ids[:, :-1], ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    names = [name for group in parameter_groups(model, OptimConfig()) for name in group.names]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert sum(memory.parameters(model.config)) == parameter_counts(model)["total"]


@torch.inference_mode()
def chunks_give_the_full_pass(model: GPT) -> None:
    ids = torch.randint(70, (3, TOKENS))
    want = model(ids)
    singly, chunks = [1] * TOKENS, [5, 1, 1, 7, 1, 20, 1, 1, 1, 1, 1]
    cases = [(singly, False), (chunks, False), ([TOKENS], False)] + [(singly, True)] * model.derives_keys
    for sizes, keep_keys in cases:
        cache = model.new_cache(3, TOKENS, keep_keys=keep_keys)
        got = torch.cat([model(part, context=cache) for part in ids.split(sizes, dim=1)], dim=1)
        torch.testing.assert_close(got, want, **LOGITS)
        assert cache.lengths == [TOKENS] * 3


@torch.inference_mode()
def last_only_gives_the_last_tokens_logits(model: GPT) -> None:
    ids = torch.randint(70, (3, TOKENS))
    want, cache = model(ids), model.new_cache(3, TOKENS, last_only=True)
    for start, end in ((0, 20), (20, 21), (21, 30)):
        got = model(ids[:, start:end], context=cache)
        torch.testing.assert_close(got, want[:, end - 1 : end], **LOGITS)


@torch.inference_mode()
def rows_of_different_lengths_are_independent(model: GPT) -> None:
    """Prompts of 3, 12, 12, 1 tokens; all grow together, by several tokens or one; one leaves, another replaces it."""
    ids = torch.randint(70, (4, TOKENS))
    want = model(ids)
    cache, rows = model.new_cache(4, TOKENS, in_use=0), [0, 1, 2, 3]
    for row, length in enumerate((3, 12, 12, 1)):
        prompt = model.new_cache(1, length)
        model(ids[row : row + 1, :length], context=prompt)
        cache.take(prompt)

    def grow(size):
        places = [(row, slice(start, start + size)) for row, start in zip(rows, cache.lengths)]
        got = model(torch.stack([ids[place] for place in places]), context=cache)
        torch.testing.assert_close(got, torch.stack([want[place] for place in places]), **LOGITS)

    for size in (1, 2, 1, 7, 1):
        grow(size)
    cache.drop(1)
    rows = [0, 3, 2]
    grow(1)
    prompt = model.new_cache(1, 5)
    model(ids[1:2, :5], context=prompt)
    cache.take(prompt)
    rows.append(1)
    for _ in range(10):
        grow(1)
    cache.drop(3)  # the last row itself
    rows.pop()
    grow(1)


@torch.inference_mode()
def prompts_that_begin_alike_give_what_each_gives_alone(model: GPT) -> None:
    starts = [2, 2, 3, 2]
    alone = [model(torch.tensor([prompt]))[0, start - 1 : -1] for prompt, start in zip(PROMPTS, starts)]
    for share in (True, False):
        tree = PromptTree(PROMPTS, starts, [4], torch.device("cpu"), share=share)
        got = model.logits(model.hidden(tree.ids, tree))[0]
        torch.testing.assert_close(got, torch.cat(alone), **LOGITS)


def in_bfloat16_it_computes_decodes_and_learns(exact: GPT, model: GPT) -> None:
    """model: the same, cast as a whole. Within the rounding that bfloat16 costs; float32 logits as ever."""
    ids = torch.randint(70, (2, 16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    whole, cache = model(ids), model.new_cache(2, 16)
    parts = torch.cat([model(ids[:, :8], context=cache), model(ids[:, 8:], context=cache)], dim=1)
    for logits in (whole, parts):
        assert logits.dtype == torch.float32
        assert (logits - exact(ids)).norm() < 0.03 * logits.norm()
    model(ids, ids).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


def no_rows_give_no_logits_and_gradients_that_are_0(model: GPT) -> None:
    logits = model(torch.zeros(0, 16, dtype=torch.long))
    assert logits.shape == (0, 16, 70)
    logits.sum().backward()


def saved_bytes(model: GPT, rows: int) -> int:
    """What autograd keeps between forward and backward, each storage once, the weights left out."""
    kept = {}

    def weigh(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.zeros(rows, model.config.sequence_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        loss = model(ids, ids, reduction="sum")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert loss.requires_grad
    return sum(size for pointer, (size, _) in kept.items() if pointer not in weights)


def activations_are_what_autograd_keeps(model: GPT) -> None:
    """Per row, by the difference of two batches. Two gradients as large as the logits (8 V bytes) come later."""
    config = model.config
    kept = saved_bytes(model, 3) - saved_bytes(model, 2)
    expected = memory.row_bytes(config, "cpu") - 8 * config.padded_vocab_size * config.sequence_len
    assert 0.8 < kept / expected < 1.05, kept / expected


def memory_is_what_the_optimiser_holds(model: GPT) -> None:
    """Within a hundredth: Muon's second moments are not counted."""
    optimizer = MuonAdamW(parameter_groups(model, OptimConfig()), Runtime(0, 1, torch.device("cpu")))
    held = sum(8 * parameter.numel() for parameter in model.parameters())
    held += sum(4 * tensor.numel() for group in optimizer.groups for tensor in group.state.values())
    assert abs(memory.fixed_bytes(model.config, "cpu")[0] / held - 1) < 0.01
