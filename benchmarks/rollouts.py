"""Rollouts, k samples per prompt: rloo.py's against what transformers offers. How fast, and how exact?

    python benchmarks/rollouts.py                             # a random Llama of 42 M parameters, float32, on a CPU
    python benchmarks/rollouts.py --hidden 2048 --layers 24 --dtype bfloat16 --prompts 32    # 1.3 B, for a GPU
    python benchmarks/rollouts.py --hidden 64 --layers 1 --vocab 500 --new_tokens 8 --rounds 1    # tiny: does it run?

usual        generate() over k rows per prompt, each of which encodes it
loop         rloo.rollout: a prompt encoded once, its cache expanded to k rows, finished rows leaving
static       the same with a cache of fixed size, expanded in place; no row leaves before all are finished
compiled     static, its step under torch.compile (on a GPU with CUDA graphs)
graph        static, its step captured in a CUDA graph once per rollout (on a GPU only)
continuous   transformers' continuous batching: paged attention, a prompt's blocks forked k times

The ways alternate; seconds are medians of the rounds after a first one, whose seconds (compiling, capturing) stand
apart. Stop tokens are a share of the vocabulary, so that samples of a random model end at all lengths, once every
--mean_length tokens. exact: share of greedy samples that are, to the last token, those of one row at a time. same:
share of samples that do not change when their prompt is asked alone, with the same seed.
"""
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache

sys.path.insert(0, str(Path(__file__).parent.parent))
import rloo  # noqa: E402
from refcache import autocast, share_prompts  # noqa: E402


@dataclass
class Args:
    hidden: int = 512
    layers: int = 6
    vocab: int = 32_000
    prompts: int = 8
    k: int = 4
    prompt_tokens: int = 256  # at most; half of it at least
    new_tokens: int = 128
    mean_length: float = 64.0  # tokens after which a sample ends, on average
    rounds: int = 3
    dtype: str = "float32"
    ways: tuple[str, ...] = ("usual", "loop", "static", "compiled", "graph", "continuous")


def pad(prompts, device):
    """Left-padded ids and their mask."""
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], True, 0, "left")
    mask = pad_sequence([torch.ones(len(prompt), dtype=torch.long) for prompt in prompts], True, 0, "left")
    return ids.to(device), mask.to(device)


def until(row, stop):
    """A sample up to and with its first stop token."""
    return tuple(row[:next((t + 1 for t, token in enumerate(row) if token in stop), len(row))])


def captured(step, cache):
    """step() in a CUDA graph. Warming up and capturing move the cache's place, which is set back."""
    places, stream = [layer.cumulative_length.clone() for layer in cache.layers], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for layer, place in zip(cache.layers, places):
        layer.cumulative_length.copy_(place)

    def replay():
        graph.replay()
        return logits
    return replay


def static(model, prompts, u, ends, wrap=lambda step, cache: step, forward=None, greedy=False):
    """The loop of rloo.decode over a cache of fixed size: the decoding step always sees the same tensors."""
    B, k, T = u.shape
    ids, mask = pad(prompts, model.device)
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + T)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    later = torch.ones(B, T, dtype=mask.dtype, device=mask.device)
    mask = torch.cat([mask, later], dim=1)  # what is to come is masked as the future
    first = dict(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=1)
    logits = model(**first).logits[:, -1]
    for layer in cache.layers:
        for name in ("keys", "values"):
            setattr(layer, name, getattr(layer, name).repeat_interleave(k, 0))
            torch._dynamo.mark_static_address(getattr(layer, name))
    logits, mask, place, u = *(x.repeat_interleave(k, 0) for x in (logits, mask, places[:, -1:])), u.flatten(0, 1)
    token, tokens, alive = torch.zeros_like(place), [], torch.ones(B * k, dtype=torch.bool, device=model.device)
    inputs = dict(input_ids=token, attention_mask=mask, position_ids=place, past_key_values=cache)
    step = wrap(lambda: (forward or model)(**inputs).logits[:, -1], cache)
    for t in range(T):
        tokens.append(rloo.draw(logits, u[:, t], top_k=int(greedy))[0])
        alive &= ~torch.isin(tokens[-1], ends)
        if t == T - 1 or not alive.any():
            break
        token.copy_(tokens[-1][:, None])
        place.add_(1)
        logits = step()
    return [until(row, set(ends.tolist())) for row in torch.stack(tokens, dim=1).tolist()]


def theirs(ends, args, seed, greedy):
    """A configuration for what transformers samples."""
    torch.manual_seed(seed)
    choice = dict(do_sample=False) if greedy else dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return GenerationConfig(**choice, max_new_tokens=args.new_tokens, eos_token_id=ends.tolist(), pad_token_id=0)


def usual(model, prompts, k, ends, args, seed, greedy):
    ids, mask = pad([prompt for prompt in prompts for _ in range(k)], model.device)
    rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=theirs(ends, args, seed, greedy))
    return [until(row, set(ends.tolist())) for row in rows[:, ids.shape[1]:].tolist()]


def continuous(model, prompts, k, ends, args, seed, greedy):
    """Its results come with the prompts' numbers in their names, and in the order in which they ended."""
    config = theirs(ends, args, seed, greedy)
    config.num_return_sequences = k  # not in the constructor, which refuses it to greedy sampling
    found = model.generate_batch([list(p) for p in prompts], generation_config=config, progress_bar=False)
    number = {}
    for name in found:
        number.setdefault(name.split("__")[0], []).append(name)
    order = sorted(number, key=lambda name: int(name.rsplit("_", 1)[-1]))
    return [[tuple(found[name].generated_tokens) for name in sorted(number[parent])] for parent in order]


def main(args: Args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch._dynamo.config.cache_size_limit = 64
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64,
        max_position_embeddings=args.prompt_tokens + args.new_tokens, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None)).to(device).eval()
    paged = deepcopy(model)  # continuous batching has an attention of its own
    share_prompts(model, args.dtype)
    rng = np.random.default_rng(0)
    ends = rng.permutation(args.vocab)[:round(args.vocab / args.mean_length)].tolist()
    ends = torch.tensor(sorted(ends), device=device)
    lengths = rng.integers(args.prompt_tokens // 2, args.prompt_tokens + 1, args.prompts)
    prompts = [tuple(rng.integers(args.vocab, size=n).tolist()) for n in lengths]
    fast = torch.compile(model.forward, dynamic=False, mode="reduce-overhead" if device == "cuda" else "default")
    tokenizer = SimpleNamespace(eos_token_id=int(ends[0]))

    @torch.no_grad()
    def ask(way, prompts, seed, greedy=False):
        model.generation_config = GenerationConfig(eos_token_id=ends.tolist())
        if way == "loop":
            flags = rloo.Args(dtype=args.dtype, max_new_tokens=args.new_tokens, rollout_tokens=10**9, seed=seed,
                              top_k=int(greedy))
            return [ys for _, ys in rloo.rollout(model, tokenizer, prompts, args.k, 1, flags).groups]
        with autocast(model, args.dtype):
            if way == "continuous":
                return continuous(paged, prompts, args.k, ends, args, seed, greedy)
            if way == "usual":
                rows = usual(model, prompts, args.k, ends, args, seed, greedy)
            else:
                u = np.random.default_rng(seed).random((len(prompts), args.k, args.new_tokens))
                how = dict(static={}, compiled=dict(forward=fast), graph=dict(wrap=captured))[way]
                rows = static(model, prompts, torch.from_numpy(u).to(device), ends, greedy=greedy, **how)
        return [rows[at:at + args.k] for at in range(0, len(rows), args.k)]

    def seconds(way, seed):
        begin = time.monotonic()
        found = ask(way, prompts, seed)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - begin, sum(len(y) for ys in found for y in ys)

    ways = [way for way in args.ways if way != "graph" or device == "cuda"]
    first, later = {way: seconds(way, 0)[0] for way in ways}, {way: [] for way in ways}
    for n in range(1, args.rounds + 1):
        for way in ways:
            later[way].append(seconds(way, n))
    truth = [ask("usual", [prompt], 0, greedy=True)[0] for prompt in prompts]
    parameters = sum(p.numel() for p in model.parameters())
    drawn = median(tokens for _, tokens in later[ways[0]])
    print(f"{parameters / 1e6:,.0f} M parameters, {args.dtype}, {device}; {args.prompts} prompts of {lengths.min()} to "
          f"{lengths.max()} tokens, {args.k} samples of at most {args.new_tokens}, {drawn:,.0f} tokens in all")
    print("| rollouts | seconds | tokens/s | first | exact | same |\n|---|---|---|---|---|---|")
    for way in ways:
        best, drawn = ask(way, prompts, 0, greedy=True), ask(way, prompts, 0)
        exact = np.mean([y == z for ys, zs in zip(best, truth) for y, z in zip(ys, zs)])
        same = np.mean([y in drawn[0] for y in ask(way, prompts[:1], 0)[0]])
        rate, taken = median(tokens / s for s, tokens in later[way]), median(s for s, _ in later[way])
        print(f"| {way} | {taken:.2f} | {rate:,.0f} | {first[way]:.1f} | {exact:.0%} | {same:.0%} |")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
