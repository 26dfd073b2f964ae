"""Which names make a package, and what is said about the others."""

from __future__ import annotations

import pytest

from adapterd.loader.errors import Code
from adapterd.loader.formats.package import Contents, judge_package
from adapterd.loader.limits import DEFAULT_LIMITS, Limits

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def judge(*names: str, limits: Limits = DEFAULT_LIMITS) -> Contents:
    return judge_package(dict.fromkeys(names, 100), limits)


def rejects(contents: Contents) -> list[tuple[Code, str]]:
    return [(p.code, p.where) for p in contents.problems if p.severity == "reject"]


def test_two_files_a_signature_a_card_and_tokenizer_files_are_a_package() -> None:
    names = (
        CONFIG,
        WEIGHTS,
        "model.sig",
        "README.md",
        "tokenizer.json",
        "special_tokens_map.json",
        "merges.txt",
    )
    contents = judge(*names)
    assert contents.problems == ()
    assert contents.left_out == ()
    assert contents.stored == tuple(sorted(names))


def test_what_is_not_needed_is_left_out_and_told() -> None:
    contents = judge(CONFIG, WEIGHTS, "trainer_state.json", "chat_template.jinja", ".gitattributes", ".cache/")
    assert contents.ok
    assert contents.stored == (CONFIG, WEIGHTS)
    assert {p.where: p.code for p in contents.problems} == dict.fromkeys(contents.left_out, Code.UNEXPECTED_FILE)
    assert contents.left_out == (".cache/", ".gitattributes", "chat_template.jinja", "trainer_state.json")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("adapter_model.bin", Code.FORBIDDEN_FILE),
        ("training_args.bin", Code.FORBIDDEN_FILE),
        ("optimizer.PT", Code.FORBIDDEN_FILE),
        ("rng_state.pth", Code.FORBIDDEN_FILE),
        ("arrays.npy", Code.FORBIDDEN_FILE),
        ("modeling_custom.py", Code.FORBIDDEN_FILE),
        ("run.sh", Code.FORBIDDEN_FILE),
        ("checkpoint-5/optimizer.pt", Code.FORBIDDEN_FILE),
        ("adapter.zip", Code.UNEXPECTED_FILE),
        ("model.gguf", Code.UNKNOWN_FORMAT),
        ("notes/a.txt", Code.UNEXPECTED_FILE),
        ("empty/", Code.UNEXPECTED_FILE),
        ("Copy of adapter_model.safetensors", Code.AMBIGUOUS_WEIGHTS),
        ("adapters.safetensors", Code.AMBIGUOUS_WEIGHTS),
        ("ADAPTER_MODEL.SAFETENSORS.bak.safetensors", Code.AMBIGUOUS_WEIGHTS),
        ("other/adapter_model.safetensors", Code.AMBIGUOUS_WEIGHTS),
        ("other/adapter_config.json", Code.AMBIGUOUS_WEIGHTS),
        ("adapter_model-00001-of-00002.safetensors", Code.SHARDED_UNSUPPORTED),
        ("adapter_model.safetensors.index.json", Code.SHARDED_UNSUPPORTED),
        ("adapter\u202enosj.exe", Code.ARCHIVE_BAD_NAME),
        ("a\nb", Code.ARCHIVE_BAD_NAME),
        ("x" * 256, Code.ARCHIVE_BAD_NAME),
        ("../escape.txt", Code.ARCHIVE_PATH),
        ("a/../../escape.txt", Code.ARCHIVE_PATH),
        ("/etc/passwd", Code.ARCHIVE_PATH),
        ("C:\\x", Code.ARCHIVE_PATH),
        ("..\\x", Code.ARCHIVE_PATH),
        ("README.MD", Code.ARCHIVE_DUPLICATE),
    ],
)
def test_a_whole_adapter_beside_it_does_not_help(name: str, code: Code) -> None:
    contents = judge(CONFIG, WEIGHTS, "README.md", name)
    assert code in {c for c, _ in rejects(contents)}
    assert name not in contents.stored
    assert all(p.where.isascii() for p in contents.problems)


def test_missing_files_are_named_with_what_to_do() -> None:
    assert rejects(judge()) == [(Code.MISSING_CONFIG, CONFIG), (Code.MISSING_WEIGHTS, WEIGHTS)]
    assert rejects(judge(CONFIG)) == [(Code.MISSING_WEIGHTS, WEIGHTS)]
    assert rejects(judge(WEIGHTS)) == [(Code.MISSING_CONFIG, CONFIG)]
    assert all(CONFIG in p.hint and WEIGHTS in p.hint for p in judge().problems)


@pytest.mark.parametrize(
    "name", ["adapters.safetensors", "0000100_adapters.safetensors", "pytorch_lora_weights.safetensors"]
)
def test_another_tools_weights_are_called_so(name: str) -> None:
    assert rejects(judge(CONFIG, name)) == [(Code.UNKNOWN_FORMAT, name)]


def test_a_lone_tensor_file_is_another_tools() -> None:
    assert rejects(judge("my_style.safetensors"))[0] == (Code.UNKNOWN_FORMAT, "my_style.safetensors")


def test_near_misses_are_told_which_name_is_read() -> None:
    browser = judge(CONFIG, "adapter_model (1).safetensors")
    assert {c for c, _ in rejects(browser)} == {Code.UNEXPECTED_FILE, Code.MISSING_WEIGHTS}
    assert WEIGHTS in browser.problems[0].message
    case = judge("Adapter_Config.json", "ADAPTER_MODEL.safetensors")
    assert {c for c, _ in rejects(case)} == {Code.UNEXPECTED_FILE, Code.MISSING_CONFIG, Code.MISSING_WEIGHTS}


def test_an_adapter_in_a_sub_folder_is_pointed_at() -> None:
    contents = judge("finance/adapter_config.json", "finance/adapter_model.safetensors", "README.md")
    assert {c for c, _ in rejects(contents)} == {
        Code.UNEXPECTED_FILE,
        Code.MISSING_CONFIG,
        Code.MISSING_WEIGHTS,
    }
    assert "finance" in contents.problems[0].hint


def test_sizes_are_capped_before_anything_is_opened() -> None:
    sizes = {CONFIG: 3 << 20, WEIGHTS: 5, "model.sig": 3 << 20}
    contents = judge_package(sizes, DEFAULT_LIMITS)
    assert rejects(contents) == [(Code.CONFIG_TOO_LARGE, CONFIG), (Code.QUOTA_EXCEEDED, "model.sig")]
    assert rejects(judge(CONFIG, WEIGHTS, limits=Limits(max_total_bytes=199))) == [(Code.QUOTA_EXCEEDED, "package")]
    assert judge(CONFIG, WEIGHTS, limits=Limits(max_total_bytes=200)).ok
    assert rejects(judge(CONFIG, WEIGHTS, "README.md", limits=Limits(max_files=2))) == [
        (Code.QUOTA_EXCEEDED, "package")
    ]


def test_refusals_come_before_warnings() -> None:
    contents = judge(CONFIG, WEIGHTS, "a.txt", "z.py")
    assert [p.severity for p in contents.problems] == ["reject", "warn"]
