from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from edge.config import (
    AiConfig,
    ApiConfig,
    AssetsConfig,
    BatchesConfig,
    BillingConfig,
    Config,
    DevConfig,
    EgressConfig,
    EngineConfig,
    IsolatesConfig,
    LimitsConfig,
    ModelOptions,
    TriggersConfig,
)
from edge.config.file import FILE_NAMES, load, strip_jsonc
from edge.errors import ConfigError

ROOT = Path(__file__).parent.parent
MINIMAL = 'name = "demo"\nmain = "worker.py"\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text("")
    return tmp_path


def write(project: Path, text: str, name: str = "edge.toml") -> Path:
    (project / name).write_text(text)
    return project / name


def refused(project: Path, text: str, name: str = "edge.toml") -> str:
    with pytest.raises(ConfigError) as raised:
        load(write(project, text, name), project)
    return raised.value.message


# -- finding -----------------------------------------------------------------------------------------------


def test_defaults_and_absolute_paths(project: Path) -> None:
    file = write(project, MINIMAL)
    assert load(None, project) == Config(
        name="demo", main=project / "worker.py", path=file, state_dir=project / ".edge"
    )


def test_the_first_name_wins_and_parents_are_searched(project: Path) -> None:
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    for name in reversed(FILE_NAMES):
        text = json.dumps({"name": "demo", "main": "worker.py"}) if "json" in name else MINIMAL
        write(project, text, name)
        assert load(None, inner).path == project / name
    write(inner.parent, MINIMAL.replace("worker.py", "../worker.py"), "wrangler.toml")
    config = load(None, inner)
    assert (config.path, config.main) == (inner.parent / "wrangler.toml", project / "worker.py")


def test_no_file_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file in .*looked for edge.toml, .*`edge init NAME`"):
        load(None, tmp_path)


def test_a_path_is_relative_to_the_working_directory(project: Path) -> None:
    write(project, MINIMAL, "other.toml")
    assert load(Path("other.toml"), project).name == "demo"
    with pytest.raises(ConfigError, match=r"nope.toml cannot be read: No such file"):
        load(Path("nope.toml"), project)
    with pytest.raises(ConfigError, match="is a folder"):
        load(Path(), project)


def test_state_dir_is_relative_to_the_file(project: Path) -> None:
    file = write(project, MINIMAL + 'state_dir = "../other-state"\n')
    assert load(file, Path("/")).state_dir == project.parent / "other-state"


# -- what is right -----------------------------------------------------------------------------------------


def test_toml_and_jsonc_mean_the_same(project: Path) -> None:
    toml = """
        [vars]
        URL = "http://x//y"
        DEEP = { list = [1, 2.5, true] }
        [ai]
        models = { "@cf/a/b" = "c" }
        [limits]
        timeout_s = 5
        [engine]
        weights = "bfloat16"
    """
    jsonc = """
    {   // a comment
        "$schema": "node_modules/wrangler/config-schema.json",
        "name": "demo", /* and
        another */ "main": "worker.py",
        "vars": {"URL": "http://x//y", "DEEP": {"list": [1, 2.5, true,],}},
        "ai": {"models": {"@cf/a/b": "c"}},
        "limits": {"timeout_s": 5},
        "engine": {"weights": "bfloat16"},
    }
    """
    from_toml = load(write(project, MINIMAL + toml), project)
    from_jsonc = load(write(project, "\ufeff" + jsonc, "wrangler.jsonc"), project)
    assert from_toml.vars == {"URL": "http://x//y", "DEEP": {"list": [1, 2.5, True]}}
    assert from_toml.ai == AiConfig(binding="AI", models={"@cf/a/b": "c"})
    assert (from_toml.limits, from_toml.engine.weights) == (LimitsConfig(timeout_s=5.0), "bfloat16")
    for field in fields(Config):
        if field.name != "path":
            assert getattr(from_toml, field.name) == getattr(from_jsonc, field.name)


def test_the_annotated_reference_names_every_key_and_shows_the_defaults() -> None:
    text = (ROOT / "wrangler-like.toml").read_text()
    for struct, section in [
        (AiConfig, "[ai]"),
        (LimitsConfig, "[limits]"),
        (DevConfig, "[dev]"),
        (IsolatesConfig, "[isolates]"),
        (EgressConfig, "[egress]"),
        (AssetsConfig, "[assets]"),
        (TriggersConfig, "[triggers]"),
        (EngineConfig, "[engine]"),
        (ApiConfig, "[api]"),
        (BillingConfig, "[billing]"),
        (BatchesConfig, "[batches]"),
        (ModelOptions, "[engine.models.my-model]"),
    ]:
        assert re.search(rf"^(# )?{re.escape(section)}$", text, re.MULTILINE)
        for field in fields(struct):
            pattern = rf"^(# )?{field.name} = |^(# )?{re.escape(section[:-1])}\.{field.name}(\..*)?\]$"
            assert re.search(pattern, text, re.MULTILINE), f"{section} {field.name} is not explained"
    for field in fields(Config):
        if field.name != "path":
            assert re.search(rf"^(# )?({field.name} = |\[\[?{field.name}[\].])", text, re.MULTILINE), (
                f"{field.name} is missing"
            )
    config = load(ROOT / "wrangler-like.toml", ROOT)
    assert (config.limits, config.dev, config.engine) == (LimitsConfig(), DevConfig(), EngineConfig())
    assert config.api == ApiConfig()
    assert config.state_dir == ROOT / ".edge"


# -- what is odd -------------------------------------------------------------------------------------------


def test_unknown_keys_are_warned_about_with_the_nearest(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(project, "mian = 1\nport = 1\n" + MINIMAL + "[limits]\ntimeout = 3\n[engine]\nxyz = 1\n")
    load(file, project)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {file}, line 1: unknown key mian; did you mean main?",
        f"warning: {file}, line 2: unknown key port; did you mean dev.port?",
        f"warning: {file}, line 6: unknown key limits.timeout; did you mean limits.timeout_s?",
        f"warning: {file}, line 8: unknown key engine.xyz; known here: device, kernels, weights, kv, deterministic, "
        "speculation, models, num_threads, max_batch_size, max_waiting, step_tokens, kv_tokens",
    ]


def test_a_model_has_options_of_its_own_or_those_of_all(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        project, MINIMAL + '[engine]\nkv = "int8"\n[engine.models."a.b"]\nweights = "int4"\nwieghts = 1\ngroup = 64\n'
    )
    engine = load(file, project).engine
    assert engine.options("a.b") == ModelOptions(weights="int4", group=64)
    assert engine.options("other") == ModelOptions(kv="int8")
    assert (
        "line 7: unknown key engine.models.a.b.wieghts; did you mean engine.models.a.b.weights?"
        in capsys.readouterr().err
    )


def test_keys_of_wrangler_are_accepted_in_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(project, MINIMAL + 'routes = []\n[[kv_namespaces]]\nbinding = "KV"\nremote = true\n')
    load(file, project)
    expected = f"warning: {file}: routes, kv_namespaces[0].remote: accepted, has no effect yet\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("key", ["durable_objects", "workflows"])
def test_what_a_worker_cannot_do_without_is_refused(project: Path, key: str) -> None:
    refused = write(project, MINIMAL + f'[[{key}.bindings]]\nname = "A"\nclass_name = "B"\n')
    with pytest.raises(ConfigError, match=rf"{key}: .* not supported yet"):
        load(refused, project)
    assert load(write(project, MINIMAL + f"[{key}]\nbindings = []\n"), project).name


# -- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("account_id = 7", "line 3: account_id: expected an id of at most 64 letters, digits, - and _, found 7"),
        ("compatibility_date = 2026-01-01", "expected a date in quotes, such as "),
        ("compatibility_date = 2026-01-01", "found the date 2026-01-01 without quotes"),
        ('compatibility_flags = ["a", 1]', 'compatibility_flags: expected a list of strings, found ["a", 1]'),
        ("vars = 3", "vars: expected a table, found 3"),
        ("ai = true", "ai: expected a table, found true"),
        ('ai.binding = "A-I"', "ai.binding: expected a name of letters, digits and _, not led by a digit"),
        ("ai.models = { x = 1 }", 'ai.models: expected a table of strings, found {"x": 1}'),
        ("limits.timeout_s = 0", "limits.timeout_s: expected a number of seconds above 0, at most 86400, found 0"),
        ("limits.timeout_s = nan", "limits.timeout_s: expected a number of seconds above 0"),
        ("limits = { timeout_s = true }", "line 3: limits.timeout_s: expected a number of seconds above 0"),
        ('dev.port = "80"', 'dev.port: expected a port from 0 (any free one) to 65535, found "80"'),
        ("dev.port = 65536", "found 65536"),
        ('engine.weights = "fp8"', 'engine.weights: expected one of "auto", "float32", "bfloat16", "int8", "int4"'),
        ('engine.models = { a = 1 }', "engine.models: expected a table of tables, found"),
        ('engine.models.a = { kv = "fp8" }', 'engine.models.a.kv: expected one of "auto", "float32"'),
        ("engine.speculation = 17", "engine.speculation: expected a whole number from 0 to 16, found 17"),
        ('engine.device = "gpu"', 'engine.device: expected "cpu", "cuda" or "cuda:N", found "gpu"'),
        ("engine.num_threads = -1", "expected a whole number of threads, 0 for all cores, found -1"),
        ("engine.kv_tokens = 1.5", "engine.kv_tokens: expected a whole number of at least 1, found 1.5"),
        ("state_dir = 1", 'state_dir: expected the path of a folder, such as ".edge", found 1'),
        ("vars.WHEN = 2026-01-01", "vars.WHEN: expected a JSON value"),
        ("vars.X = [{ y = inf }]", "vars.X[0].y: expected a JSON value"),
        ("vars.AI = 1\nai = {}", "ai.binding: 'AI' is the name of vars.AI already; rename one of them"),
        (
            'kv_namespaces = [{ binding = "X" }, { binding = "X" }]',
            "kv_namespaces[1].binding: 'X' is the name of kv_namespaces[0].binding already",
        ),
        ("r2_buckets = [{ bucket_name = 'b' }]", "r2_buckets[0].binding: missing"),
        ("kv_namespaces = 3", "kv_namespaces: expected a list of tables, found 3"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_file_line_key_and_what_was_expected(project: Path, line: str, expected: str) -> None:
    message = refused(project, MINIMAL + line + "\n")
    assert message.startswith(f"{project / 'edge.toml'}, line ")
    assert expected in message


def test_all_problems_are_told_at_once(project: Path) -> None:
    message = refused(project, 'name = "No Good"\nmain = "nope.py"\n[dev]\nport = -1\n[limits]\ntimeout_s = "1"\n')
    lines = message.splitlines()
    assert lines[0].endswith("edge.toml has 4 problems:")
    assert [line.split(":")[:2] for line in lines[1:]] == [
        ["  line 1", " name"],
        ["  line 6", " limits.timeout_s"],
        ["  line 4", " dev.port"],
        ["  line 2", " main"],
    ]


def test_what_is_required(project: Path) -> None:
    message = refused(project, "")
    assert "name: missing; expected a name of at most 63" in message
    assert 'main: missing; expected the path of the worker\'s Python file, such as "src/worker.py"' in message


def test_main_must_be_a_python_file_that_exists(project: Path) -> None:
    assert refused(project, 'name = "a"\nmain = "src/gone.py"').endswith(
        f"main: there is no file {project}/src/gone.py"
    )
    assert "only Python workers are run here" in refused(project, 'name = "a"\nmain = "index.ts"')
    assert 'main: expected the path of the worker\'s Python file, such as "src/worker.py", found ""' in refused(
        project, 'name = "a"\nmain = ""'
    )


def test_syntax_errors_say_where(project: Path) -> None:
    assert "edge.toml is not valid TOML: Invalid value (at line 2, column 8)" in refused(
        project, 'name = "a"\nmain = x"'
    )
    assert "line 3, column 1" in refused(project, '{\n  "name": "a"\n"main": 1}', "wrangler.json")
    assert "is not valid JSON: NaN is not JSON" in refused(project, '{"name": NaN}', "wrangler.json")
    assert "expected a JSON object, found [1]" in refused(project, "[1]", "wrangler.json")
    assert "is not valid JSON" in refused(project, "[" * 100_000, "wrangler.json")
    assert "is not valid TOML" in refused(project, "a = " + "[" * 100_000)


def test_what_is_no_text_or_too_long_is_refused(project: Path) -> None:
    (project / "edge.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 8 is 0xff"):
        load(None, project)
    assert "longer than 1048576 bytes" in refused(project, "#" * (1 << 20) + "\n")


# -- JSONC -------------------------------------------------------------------------------------------------

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["//", "/*", "*/", ",]", '",}"', "\\"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
_filler = st.sampled_from(["", " ", "\n", "// c ] }\n", '/* , " */', "/**/", "//\n", "/* a\n * b */"])


@given(value=_json, data=st.data())
def test_comments_and_trailing_commas_change_nothing(value: object, data: st.DataObject) -> None:
    plain = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    dressed = "".join(_dress(token, data) for token in re.findall(r'"(?:[^"\\]|\\.)*"|[^"]', plain))
    stripped = strip_jsonc(dressed)
    assert json.loads(stripped) == value
    assert len(stripped) == len(dressed)
    assert [i for i, char in enumerate(stripped) if char == "\n"] == [i for i, c in enumerate(dressed) if c == "\n"]


def _dress(token: str, data: st.DataObject) -> str:
    if token not in list("{}[]:,"):
        return token
    before = data.draw(_filler)
    return before + token + data.draw(_filler)


@given(st.text(alphabet='{}[]",:/*\\ \n1a', max_size=60))
def test_any_text_keeps_its_length_and_lines(text: str) -> None:
    stripped = strip_jsonc(text)
    assert (len(stripped), stripped.count("\n")) == (len(text), text.count("\n"))
