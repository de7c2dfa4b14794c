"""The real model, loaded once; engines over it are cheap."""

import pytest

from cache_store import SnapshotStore
from worker.engine import model as model_loader
from worker.engine.engine import Document, Engine, Sampling
from worker.engine.report import Silent

BOOK = (
    "The lighthouse at Corran Point was built in 1871 by the harbour board. Its keeper, Agnes Tull, wrote "
    "down the weather every four hours. In the winter of 1903 a ship called the Marigold struck the reef "
    "below the light, and all nineteen of her crew were brought ashore in the keeper's own boat. "
)


@pytest.fixture(scope="session")
def model(smollm2):
    return model_loader.load(smollm2, "smollm2-135m-instruct")


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path / "snapshots", 1_000_000_000, min_free_bytes=0)


@pytest.fixture
def engine(model, store):
    return Engine(model, store)


@pytest.fixture
def document(model):
    """A function: a document whose reusable prefix has exactly `num_tokens` tokens."""
    builder = Engine(model, None)._prompts

    def of_length(num_tokens: int) -> Document:
        words = (BOOK * (2 + num_tokens // 60)).split(" ")
        low, high = 0, len(words)
        while low < high:
            middle = (low + high) // 2
            prompt = builder.build([Document("d", " ".join(words[:middle]))], "x")
            low, high = (low, middle) if prompt.document_end >= num_tokens else (middle + 1, high)
        text = " ".join(words[:low])
        # Words may be several tokens long: a full stop more or a letter less is one token each.
        while builder.build([Document("d", text)], "x").document_end > num_tokens:
            text = text[:-1]
        while builder.build([Document("d", text)], "x").document_end < num_tokens:
            text += " a"
        assert builder.build([Document("d", text)], "x").document_end == num_tokens
        return Document("d", text)

    return of_length


@pytest.fixture
def answer():
    """A function: the output of one greedy request."""

    def ask(engine, document, question="When was it built?", max_output_tokens=16, report=None, reuse=True):
        sampling = Sampling(max_output_tokens)
        return engine.generate([document], question, sampling, report or Silent(), reuse)

    return ask
