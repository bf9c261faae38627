"""Rollouts: k samples of each prompt, by `refcache.sample` and by the ways that transformers offers. How fast, and how exact?

    python benchmarks/rollouts.py                                                       # a random Llama of 26 M parameters, float32, on a CPU
    python benchmarks/rollouts.py --hidden 2048 --layers 24 --dtype bfloat16 --prompts 32    # 1.3 B, for a GPU

usual        generate() over k rows a prompt, each of which encodes it
loop         refcache.sample: a prompt encoded once, its cache expanded to k rows, finished rows leaving
static       the same with a cache of fixed size, which is expanded in place; no row leaves before all are finished
compiled     static, its step under torch.compile (on a GPU with CUDA graphs)
graph        static, its step captured in a CUDA graph once a rollout (on a GPU only)
continuous   transformers' continuous batching: paged attention, a prompt's blocks forked k times

The ways alternate; seconds are medians of the rounds after a first one, whose seconds (compiling, capturing) stand apart. Stop tokens are a
share of the vocabulary, so that samples of a random model end at all lengths, once every --mean_length tokens.
exact: greedy samples that are, to the last token, those of one row at a time; same: samples that do not change when their prompt is asked alone,
with the same seed.
"""
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
import tyro
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache

sys.path.insert(0, str(Path(__file__).parent.parent))
from refcache import autocast, draw, pad, sample  # noqa: E402


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


def static(model, prompts, u, ends, wrap=lambda step, cache: step, forward=None, temperature=1.0):
    """refcache's loop over a cache of fixed size: the decode step always sees the same tensors."""
    B, k, T = u.shape
    ids, mask = pad(prompts, "left", model.device)
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + T)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    mask = torch.cat([mask, torch.ones(B, T, dtype=mask.dtype, device=mask.device)], dim=1)  # what is to come is masked as the future
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    for layer in cache.layers:
        for name in ("keys", "values"):
            setattr(layer, name, getattr(layer, name).repeat_interleave(k, 0))
            torch._dynamo.mark_static_address(getattr(layer, name))
    logits, mask, place, u = *(x.repeat_interleave(k, 0) for x in (logits, mask, places[:, -1:])), u.flatten(0, 1)
    token, tokens, alive = torch.zeros_like(place), [], torch.ones(B * k, dtype=torch.bool, device=model.device)
    step = wrap(lambda: (forward or model)(input_ids=token, attention_mask=mask, position_ids=place, past_key_values=cache).logits[:, -1], cache)
    for t in range(T):
        tokens.append(draw(logits, u[:, t], temperature)[0])
        alive &= ~torch.isin(tokens[-1], ends)
        if t == T - 1 or not alive.any():
            break
        token.copy_(tokens[-1][:, None])
        place.add_(1)
        logits = step()
    stop = set(ends.tolist())
    rows = torch.stack(tokens, dim=1).tolist()
    return [tuple(row[:next((t + 1 for t, x in enumerate(row) if x in stop), T)]) for row in rows]


def theirs(ends, args, seed, temperature):
    """A configuration for what transformers samples."""
    torch.manual_seed(seed)
    choice = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
    return GenerationConfig(**choice, max_new_tokens=args.new_tokens, eos_token_id=ends.tolist(), pad_token_id=0)


def usual(model, prompts, k, ends, args, seed, temperature):
    ids, mask = pad([prompt for prompt in prompts for _ in range(k)], "left", model.device)
    rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=theirs(ends, args, seed, temperature))[:, ids.shape[1]:].tolist()
    stop = set(ends.tolist())
    return [tuple(row[:next((t + 1 for t, x in enumerate(row) if x in stop), len(row))]) for row in rows]


def continuous(model, prompts, k, ends, args, seed, temperature):
    """Its results come with the prompts' numbers in their names, and in the order in which they ended."""
    config = theirs(ends, args, seed, temperature)
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
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=args.layers, tie_word_embeddings=True,
        num_attention_heads=args.hidden // 64, max_position_embeddings=args.prompt_tokens + args.new_tokens, bos_token_id=None, eos_token_id=None)).to(device).eval()
    rng = np.random.default_rng(0)
    ends = torch.tensor(sorted(rng.permutation(args.vocab)[:round(args.vocab / args.mean_length)].tolist()), device=device)
    lengths = rng.integers(args.prompt_tokens // 2, args.prompt_tokens + 1, args.prompts)
    prompts = [tuple(rng.integers(args.vocab, size=n).tolist()) for n in lengths]
    fast = torch.compile(model.forward, dynamic=False, mode="reduce-overhead" if device == "cuda" else "default")
    asked = SimpleNamespace(dtype=args.dtype, max_new_tokens=args.new_tokens)

    @torch.no_grad()
    def ask(way, prompts, seed, temperature=1.0):
        rng = np.random.default_rng(seed)
        u = torch.from_numpy(rng.random((len(prompts), args.k, args.new_tokens))).to(device)
        model.generation_config = GenerationConfig(eos_token_id=ends.tolist())
        with autocast(model, args.dtype):
            if way == "loop":
                return sample(model, SimpleNamespace(eos_token_id=int(ends[0])), prompts, args.k, np.random.default_rng(seed), asked, temperature, rollout_tokens=10**9)[0]
            if way == "continuous":
                return continuous(model, prompts, args.k, ends, args, seed, temperature)
            if way == "usual":
                rows = usual(model, prompts, args.k, ends, args, seed, temperature)
            else:
                how = dict(static={}, compiled=dict(forward=fast), graph=dict(wrap=captured))[way]
                rows = static(model, prompts, u, ends, temperature=temperature, **how)
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
    truth = [ask("usual", [prompt], 0, 0.0)[0] for prompt in prompts]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:,.0f} M parameters, {args.dtype}, {device}; {args.prompts} prompts of {lengths.min()} to {lengths.max()} tokens, {args.k} samples of at most "
          f"{args.new_tokens}, {median(tokens for _, tokens in later[ways[0]]):,.0f} in all")
    print("| rollouts | seconds | tokens/s | first | exact | same |\n|---|---|---|---|---|---|")
    for way in ways:
        greedy, drawn = ask(way, prompts, 0, 0.0), ask(way, prompts, 0)
        exact = np.mean([y == z for ys, zs in zip(greedy, truth) for y, z in zip(ys, zs)])
        same = np.mean([y in drawn[0] for y in ask(way, prompts[:1], 0)[0]])
        rate = median(tokens / s for s, tokens in later[way])
        print(f"| {way} | {median(s for s, _ in later[way]):.2f} | {rate:,.0f} | {first[way]:.1f} | {exact:.0%} | {same:.0%} |")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
