"""Decoding by graph replay, against the plain loop. A stand-in records and replays as a CUDA graph does; with a GPU the rollouts of CASES are repeated on real ones."""
import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from conftest import tiny_model
from tandem import Reader, adapted, rollout
from test_rollout import PROMPTS, step_schedule, word_schedule

LONG = dict(group_size=4, max_new_tokens=90, temperature=1.5, seed=3)  # (the cache begins with 64 slots, so it grows on the way)


class Graph:
    """What matters of a CUDA graph, on the CPU. It holds the kernels that were launched, with the memory they were launched on, and launches
    them again: Python's values of that moment are burned in, and nothing else is looked at. While it records, nothing is computed (what was
    computed is undone). It does not keep alive what it reads; a GPU would read freed memory, and here it is an error."""
    made = []

    def __init__(self):
        self.kernels, self.own, self.replays = [], {}, 0  # own: by its id, each tensor that a kernel made
        Graph.made.append(self)

    def replay(self):
        self.replays += 1
        for func, args, kwargs, made in self.kernels:
            args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Lent) else x, (args, kwargs))
            for old, new in zip(made, tensors(func(*args, **kwargs))):
                if old is not None and old.data_ptr() != new.data_ptr():  # (the same: a view)
                    old.copy_(new)


class Lent:
    """A tensor that a graph reads or writes, and does not own."""
    def __init__(self, tensor):
        self.reference = weakref.ref(tensor)

    def tensor(self):
        assert self.reference() is not None, "the graph uses memory that was freed"
        return self.reference()


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Recording(TorchDispatchMode):
    """torch.cuda.graph(graph)."""
    waiting = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)  # kernels that make the host wait for the GPU

    def __init__(self, graph, pool=None):
        super().__init__()
        self.graph, self.pool, self.before = graph, pool, {}  # before: each lent tensor's memory as it was

    def lend(self, x):
        if not isinstance(x, torch.Tensor) or id(x) in self.graph.own:
            return x
        self.before.setdefault(x.untyped_storage().data_ptr(), (x, x.clone()))
        return Lent(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.waiting:
            raise RuntimeError("operation not permitted when stream is capturing")
        given, lent = {id(x) for x in tensors((args, kwargs))}, tree_map(self.lend, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        made = [None if id(x) in given else x for x in tensors(out)]  # None: written in place
        self.graph.own.update({id(x): x for x in made if x is not None})
        self.graph.kernels.append((func, *lent, made))
        return out

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        if error is not None:
            raise RuntimeError("operation failed due to a previous error during capture")  # (what torch says first; the cause is the context)
        for tensor, before in self.before.values():  # nothing was computed:
            tensor.copy_(before)
        for tensor in self.graph.own.values():
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in self.before:
                tensor.fill_(float("nan"))
        self.before = {}


@pytest.fixture
def graphs(monkeypatch):
    """Readers on the CPU replay, by the stand-in."""
    monkeypatch.setattr(Reader, "graphs", "cpu")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: "default")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    streams, closed = [], []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *pool: closed.append(pool), raising=False)
    Graph.made = []
    yield SimpleNamespace(made=Graph.made, streams=streams, closed=closed)
    Graph.made = []


def both(monkeypatch, *args, **settings):
    """(the plain loop's rollout, the replaying one's, calls of the models' layers in each)."""
    forward, calls, kind = Reader.forward, [0, 0], Reader.graphs
    out = []
    for i, graphs in enumerate((None, kind)):
        monkeypatch.setattr(Reader, "graphs", graphs)
        monkeypatch.setattr(Reader, "forward", lambda self, *inputs, i=i: calls.__setitem__(i, calls[i] + 1) or forward(self, *inputs))
        out.append(rollout(*args, **settings))
    return *out, calls


def same(one, two):
    return all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("ids", "lengths", "senior_mask", "finished", "turns"))


CASES = {
    "solo": (None, {}), "word": (word_schedule(range(20, 30)), {}), "token": (word_schedule(range(40)), {}),
    "few rows at a time": (word_schedule(range(20, 30)), {"max_rows": 5}),
    "hand-off": (step_schedule([["x", "\n", "\n\n", "a\n"][i % 4] for i in range(40)], alternate=True), {}),
    "greedy": (word_schedule(range(20, 30)), {"temperature": 0.0}), "vocabulary": (None, {"vocab_size": 30, "top_k": 5, "top_p": 0.9}),
}


@pytest.mark.parametrize("case", CASES)
def test_replay_writes_what_the_plain_loop_writes(case, graphs, monkeypatch):
    schedule, settings = CASES[case]
    plain, replayed, calls = both(monkeypatch, tiny_model(0), tiny_model(1), PROMPTS, schedule=schedule, stops=[1], **{**LONG, **settings})
    assert same(plain, replayed) and plain.lengths.max() > 64 and plain.lengths.min() < plain.lengths.max()
    replays = sum(graph.replays for graph in graphs.made)
    assert replays > 0 and calls[1] + replays - len(graphs.made) == calls[0]  # each step is either run or replayed; a capture is a run that counts for nothing
    if case in ("solo", "word", "token", "vocabulary"):
        assert replays > 0.75 * calls[0], (replays, calls)
    assert Reader.graphs == "cpu" and not graphs.streams and not graphs.closed


def test_replay_with_one_set_of_weights(graphs, monkeypatch):
    base = tiny_model(0)
    senior = adapted(base, 4, 0)
    for name, p in senior.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    for schedule in (word_schedule(range(20, 30)), None):
        plain, replayed, _ = both(monkeypatch, senior, base, PROMPTS, schedule=schedule, stops=[1], **LONG)
        assert same(plain, replayed) and sum(graph.replays for graph in graphs.made) > 60
        Graph.made.clear()


def test_replayed_logits_are_the_models(graphs):
    """Against the model itself, without a cache: for rows that leave, a cache that grows at a single token or at many, and rows that wait."""
    model, tokens = tiny_model(0), torch.randint(3, 40, (5, 200), generator=torch.Generator().manual_seed(0))
    reader, upto = Reader([model], 40, 5, 200), torch.tensor([3, 9, 1, 30, 7])
    with torch.no_grad():
        reader.read(tokens, upto)
        for step in range(60):
            if step in (20, 40):
                keep = torch.tensor([0, 3, 4] if step == 20 else [2, 0])
                reader.select(keep)
                tokens, upto = tokens[keep], upto[keep]
            new = torch.ones_like(upto)
            new[step % len(new)] = 50 if step == 50 else step % 3 > 0  # now and then a row waits; once, one reads what another model wrote
            upto += new
            got, = reader.read(tokens, upto, wanted=[new.nonzero()[:, 0]])
            want = [model(row[None, :end]).logits[0, -1] for row, end, n in zip(tokens, upto, new) if n]
            assert torch.allclose(got, torch.stack(want), atol=2e-5), step
    assert len(graphs.made) == 5 and sum(graph.replays for graph in graphs.made) == 60 - 5 - 1  # at first, for fewer rows and more slots (each twice)
    assert reader.slots == 144


def test_weights_that_change_between_rollouts_are_the_new_ones(graphs, monkeypatch):
    senior, settings = tiny_model(0), dict(schedule=None, stops=[1], **LONG)
    first = rollout(senior, None, PROMPTS, **settings)
    with torch.no_grad():
        for p in senior.parameters():
            p.mul_(1.1)
    plain, replayed, _ = both(monkeypatch, senior, None, PROMPTS, **settings)
    assert same(plain, replayed) and not torch.equal(first.ids, plain.ids)


def test_nothing_of_a_rollout_stays_in_memory(graphs):
    """A cycle that holds a reader would hold its caches until Python happens to look for cycles."""
    import gc
    gc.collect()
    gc.disable()
    try:
        made = []
        init = Reader.__init__
        Reader.__init__ = lambda self, *args: (init(self, *args), made.append(weakref.ref(self)))[0]
        def stop(ids, lengths):  # (broken off on the way: at its end a rollout lets go of its graphs anyway)
            if lengths.max() > 70:
                raise KeyboardInterrupt
            return lengths < 0
        with contextlib.suppress(KeyboardInterrupt):
            rollout(tiny_model(0), tiny_model(1), PROMPTS, schedule=word_schedule(range(20, 30)), also_stop=stop, stops=[], **LONG)
        graphs_left = [weakref.ref(graph) for graph in Graph.made]
        Graph.made.clear()
        assert len(made) == 1 and not any(ref() for ref in made) and len(graphs_left) == 2 and not any(ref() for ref in graphs_left)
    finally:
        Reader.__init__ = init
        gc.enable()


def test_a_model_that_cannot_be_captured_is_run_step_by_step(graphs, monkeypatch, capsys):
    """Its layers ask the GPU for a number on the way (some experts' routers do). One line says so, once, and the rollout is the plain one."""
    senior, junior = tiny_model(0), tiny_model(1)
    layer = junior.model.layers[1].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(x) * (1.0 if bool((x == x).all()) else 0.0)
    plain, replayed, calls = both(monkeypatch, senior, junior, PROMPTS, schedule=word_schedule(range(20, 30)), stops=[1], **LONG)
    said = capsys.readouterr()
    assert same(plain, replayed) and Reader.graphs is None and graphs.streams == ["default"] and graphs.closed == [(None, (0, 1))]
    assert (said.out + said.err).count("without CUDA graphs") == 1 and "not permitted" in said.out + said.err
    assert calls[1] <= calls[0] + 2


def test_the_stand_in_is_as_strict_as_a_graph():
    """Else the tests above would show nothing: it burns values in, computes nothing while it records, and does not keep what it reads."""
    x, y, scale = torch.ones(3), torch.zeros(3), [2.0]
    graph = Graph()
    with Recording(graph):
        y.add_(x * scale[0])
        z = y + 1
    assert y.tolist() == [0, 0, 0] and z.isnan().all()
    scale[0] = 100.0
    graph.replay()
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [12, 12, 12] and z.tolist() == [13, 13, 13]
    x = torch.ones(3)  # another tensor: the graph's is gone
    with pytest.raises(AssertionError, match="freed"):
        graph.replay()
    with pytest.raises(RuntimeError, match="previous error") as caught, Recording(Graph()):
        bool(y.sum() > 0)
    assert "not permitted" in str(caught.value.__context__)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_cuda_graphs_write_what_the_plain_loop_writes(case, monkeypatch):
    """In fp32, token for token."""
    schedule, settings = CASES[case]
    senior, junior = tiny_model(0).cuda(), tiny_model(1).cuda()
    plain, replayed, calls = both(monkeypatch, senior, junior, PROMPTS, schedule=schedule, stops=[1], **{**LONG, **settings})
    assert Reader.graphs == "cuda" and same(plain, replayed) and calls[1] < (0.8 if case == "hand-off" else 0.2) * calls[0]
