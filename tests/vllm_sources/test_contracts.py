"""Names and constants of vLLM that this project uses without importing them, for each release.

The tests read sources instead of running them: those of the installed release, those that
`scripts/check_vllm.sh` has unpacked, and those that `EPD_VLLM_SOURCES` names.
`tests/ec_store/vllm_connector` and `tests/vllm_wire` run the same with the installed release.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from epd.api.chat import CHAT, TEMPLATE
from epd.api.items import PICTURE, TEXTS
from epd.edge.engine_headers import SESSION
from epd.errors import BadRequest
from epd.kv_events.feed import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from epd.media.parts import FRAMES
from epd.routing.instances import Role
from epd.routing.reports import KV_BYTES, KV_SECONDS, RUNNING, WAITING
from epd.tools.doctor.kv_bandwidth import EXTERNAL_TOKENS
from epd.tools.up.encoders import ENCODER_DECODERS, text_architectures
from epd.tools.up.engine import FETCHES_ONCE, Engine
from epd.tools.up.engine_ends import MEMORY_CAUSES
from epd.tools.up.memory import VLLM_SHARE
from epd.tools.up.platforms import OFFLINE, PLATFORMS
from epd.tools.up.settings import FleetSettings
from epd.transfer.encoded import TIMESTAMPS
from epd.transfer.nixl import KEEP, NixlPush
from tests.vllm_sources.reading import (
    ROOT,
    Source,
    assigned,
    fields,
    is_abstract,
    methods,
    parsed,
    positional,
    sources,
)

EC = "distributed/ec_transfer/ec_connector"
KV = "distributed/kv_transfer/kv_connector"
SOURCES = sources()
each_source = pytest.mark.parametrize(
    "vllm", SOURCES or [None], ids=[one.name for one in SOURCES] or ["none"]
)
pytestmark = [
    each_source,
    pytest.mark.skipif(
        not SOURCES, reason="no sources of vLLM: scripts/test.sh installs it, check_vllm.sh fetches"
    ),
]

URL = "data:image/png;base64,AAAA"
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": "a"}, "text"),
    "input_text": ({"text": "a"}, "text"),
    "output_text": ({"text": "a"}, "text"),
    "refusal": ({"refusal": "a"}, "text"),
    "thinking": ({"thinking": "a"}, "text"),
    "tool_reference": ({"name": "a"}, "text"),
    "image_url": ({"image_url": {"url": URL}}, "image"),
    PICTURE: ({"image_url": URL}, "image"),
    "audio_url": ({"audio_url": {"url": URL}}, "audio"),
    "input_audio": ({"input_audio": {"data": "AAAA", "format": "wav"}}, "audio"),
    "video_url": ({"video_url": {"url": URL}}, "video"),
    "image_embeds": ({"image_embeds": {}}, "refused"),
    "audio_embeds": ({"audio_embeds": {}}, "refused"),
    "video_embeds": ({"video_embeds": {}}, "refused"),
    "prompt_embeds": ({"data": "AAAA"}, "refused"),
    "image_pil": ({"image_pil": "AAAA"}, "refused"),
}
"""How the proxy classifies each of vLLM's content parts. SECURITY.md (S26) says why it refuses
some."""


def test_every_content_part_of_vllms_is_known(vllm: Source) -> None:
    assert vllm.keys_of("renderers", "MM_PARSER_MAP") == PARTS.keys()
    for kind, (more, expected) in PARTS.items():
        body = {"messages": [{"role": "user", "content": [{"type": kind, **more}]}]}
        try:
            items = list(CHAT.items(body))
            found: str = items[0].modality if items else "text"
        except BadRequest:
            found = "refused"
        assert (kind, found) == (kind, expected)


def test_parts_that_are_text_are_so_to_vllm(vllm: Source) -> None:
    [texts] = [
        ast.literal_eval(value.args[0])
        for path in vllm.files("renderers")
        for name, value in assigned(parsed(path))
        if name == "TEXT_PART_TYPES" and isinstance(value, ast.Call)
    ]

    assert {*texts, "tool_reference"} == TEXTS


def test_the_media_type_of_media_only_tells_frames_from_other_videos(vllm: Source) -> None:
    """`content_key` relies on this."""
    folder = "multimodal/media"
    for module, name in (("image", "Image"), ("audio", "Audio"), ("video", "Video")):
        load = methods(vllm.a_class(f"{folder}/{module}.py", f"{name}MediaIO"))["load_base64"]
        names = [node.id for node in ast.walk(load) if isinstance(node, ast.Name)]
        words = {node.value for node in ast.walk(load) if isinstance(node, ast.Constant)}
        assert names.count("media_type") == (name == "Video")
        assert (FRAMES in words) == (name == "Video")


def test_the_ec_connector_overrides_the_methods_that_vllm_calls(vllm: Source) -> None:
    base = methods(vllm.a_class(f"{EC}/base.py", "ECConnectorBase"))
    module = parsed(ROOT / "ec_store" / "vllm_connector" / "connector.py")
    [connector] = [
        one
        for one in module.body
        if isinstance(one, ast.ClassDef) and one.name == "ECStoreConnector"
    ]
    own = methods(connector)
    public = {name for name in own if not name.startswith("_")}

    assert public - base.keys() == set()
    assert {name for name, method in base.items() if is_abstract(method)} - public == set()
    for name in (public & base.keys()) | {"__init__"}:
        theirs, ours = positional(base[name]), positional(own[name])
        required = len(ours) - len(own[name].args.defaults)
        takes_more = own[name].args.vararg is not None
        assert required <= len(theirs), name
        assert takes_more or len(ours) >= len(theirs), name
        # vLLM passes some parameters by name: they need the same name here, or **kwargs.
        assert own[name].args.kwarg is not None or ours[: len(theirs)] == theirs, name


def test_encode_replies_have_the_fields_that_the_proxy_reads(vllm: Source) -> None:
    [collect] = [
        one
        for one in parsed(vllm.package / EC / "utils.py").body
        if isinstance(one, ast.FunctionDef) and one.name == "collect_ec_item_metadata"
    ]
    words = {node.value for node in ast.walk(collect) if isinstance(node, ast.Constant)}
    resolver = methods(vllm.a_class(f"{EC}/utils.py", "PlaceholderMetadataResolver"))

    assert {"item_indices", "metadata"} <= words
    assert positional(resolver["fields_for"]) == ["modality"]


@pytest.mark.parametrize("api", ["chat_completion", "completion"])
def test_requests_and_answers_carry_transfer_parameters(vllm: Source, api: str) -> None:
    path = f"entrypoints/openai/{api}/protocol.py"
    name = "ChatCompletion" if api == "chat_completion" else "Completion"
    for kind in ("Request", "Response"):
        found = fields(vllm.a_class(path, f"{name}{kind}"))
        assert "kv_transfer_params" in found
        assert "ec_transfer_params" in found or api == "completion"


def test_chat_requests_have_the_fields_of_their_template(vllm: Source) -> None:
    path = "entrypoints/openai/chat_completion/protocol.py"

    assert {*TEMPLATE} <= fields(vllm.a_class(path, "ChatCompletionRequest"))


@pytest.mark.parametrize(
    ("path", "name", "field"),
    [
        ("entrypoints/serve/engine/protocol.py", "PromptTokenUsageInfo", "created_cache_tokens"),
        ("entrypoints/openai/responses/protocol.py", "InputTokensDetails", "cache_write_tokens"),
        ("entrypoints/anthropic/protocol.py", "AnthropicUsage", "cache_creation_input_tokens"),
        ("entrypoints/anthropic/protocol.py", "AnthropicUsage", "input_tokens"),
        ("entrypoints/serve/engine/protocol.py", "ModelCard", "parent"),
    ],
)
def test_answers_have_the_fields_that_the_proxy_reads(
    vllm: Source, path: str, name: str, field: str
) -> None:
    assert field in fields(vllm.a_class(path, name))


def test_nixl_reads_the_parameters_that_the_proxy_sends(vllm: Source) -> None:
    words = vllm.words(f"{KV}/v1/nixl")

    assert {*KEEP, *NixlPush.COORDINATES, "remote_request_id"} - words == set()


def test_raw_and_bare_items_of_one_modality_are_not_mixed(vllm: Source) -> None:
    """`_metadata_uuids` in `epd/transfer/encoded.py` relies on this."""
    words = vllm.words("renderers")

    for modality in ("image", "audio", "video"):
        assert f"Mixing raw {modality} and embedding inputs is not allowed" in words


def test_engines_replace_cached_media_by_what_has_their_name(vllm: Source) -> None:
    """The reason for `ec_store/vllm_connector/media_cache.py`; without it that can go."""
    cache = vllm.a_class("multimodal/cache/lru.py", "LruKeyReplicatedReceiverCache")

    assert "self._cache.pop(mm_hash, None)" in ast.unparse(cache)
    assert "has_passthrough_data" in vllm.text("multimodal/processing/processor.py")


def test_processors_write_dummy_text_for_all_items(vllm: Source) -> None:
    """Therefore some models refuse raw items mixed with bare items of the same modality."""
    processor = vllm.text("multimodal/processing/processor.py")

    assert "self._get_hf_mm_text(mm_items.get_all_counts())" in processor


def _registered(vllm: Source, factory: str) -> set[str]:
    module = parsed(vllm.package / factory)
    return {
        node.args[0].value
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "register_connector"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_connectors_that_the_documents_name_are_registered(vllm: Source) -> None:
    there = _registered(vllm, f"{EC}/factory.py") | _registered(vllm, f"{KV}/factory.py")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"\b\w+Connector(?:V1)?\b", page.read_text(encoding="utf-8"))
        if name[:1].isupper() and name != "ECStoreConnector"
    }

    assert len(named) > 8
    assert named - there == set()


def test_vllm_has_the_flags_that_epd_up_writes(vllm: Source, tmp_path: Path) -> None:
    settings = FleetSettings(
        model="m",
        served_model_name="m",
        allowed_local_media_path=str(tmp_path),
        max_model_len=1,
        max_num_seqs=1,
        kv_events=True,
    )
    every = [
        word
        for platform in PLATFORMS.values()
        for role in Role
        for word in Engine(
            role=role,
            port=1,
            settings=settings,
            store="file:///ec",
            platform=platform,
            devices=("0", "1"),
            memory=0.5,
            kv_extra={"bidirectional_kv_xfer": True},
        ).command()
        if word.startswith("--")
    ]
    files = [path for path in vllm.files("entrypoints") if path.name == "cli_args.py"]
    of_servers = {
        "--" + one.replace("_", "-")
        for path in files
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
        for one in fields(node)
    }
    known = vllm.words("engine/arg_utils.py") | of_servers
    known |= {name.replace("--", "--no-", 1) for name in known if name.startswith("--")}

    assert len(set(every)) > 12
    assert {*every} - known - {"--host", "--port"} == set()
    assert {"--host", "--port"} <= of_servers | vllm.words("entrypoints/common", "entrypoints/cli")


def test_vllm_reads_the_variables_that_epd_up_sets(vllm: Source) -> None:
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"}
    ours = {*side_channel, *FETCHES_ONCE, *OFFLINE}
    for platform in PLATFORMS.values():
        ours |= set(platform.environment)
    known = vllm.words("envs.py")

    assert {name for name in ours if name.startswith("VLLM_")} - known == set()


@pytest.mark.parametrize("kind", ["ec", "kv"])
def test_roles_of_connectors_are_vllms(vllm: Source, kind: str) -> None:
    words = vllm.words(f"config/{kind}_transfer.py")

    assert {f"{kind}_producer", f"{kind}_consumer"} <= words


def test_the_cpu_executor_exists(vllm: Source) -> None:
    module, _, name = PLATFORMS["cpu"].flags[-1].rpartition(".")

    assert methods(vllm.a_class(module.removeprefix("vllm.").replace(".", "/") + ".py", name))


def test_an_encode_instance_measures_no_memory(vllm: Source) -> None:
    """It has no KV cache, and only engines with one measure."""
    v1 = methods(vllm.a_class("v1/worker/gpu_model_runner.py", "GPUModelRunner"))
    v2 = methods(vllm.a_class("v1/worker/mm_encoder_model_runner.py", "MMEncoderModelRunner"))
    core = methods(vllm.a_class("v1/engine/core.py", "EngineCore"))["_initialize_kv_caches"]
    [measures] = [one for one in core.body if ".determine_available_memory(" in ast.unparse(one)]

    assert "(not get_ec_transfer().is_consumer):\n    return {}" in ast.unparse(
        v1["get_kv_cache_spec"].body[1]
    )
    assert ast.unparse(v2["get_kv_cache_spec"].body[-1]) == "return {}"
    assert isinstance(measures, ast.If)
    assert ast.unparse(measures.test) == "has_kv_cache"


def test_causes_of_an_end_are_told_by_words_that_vllm_logs(vllm: Source) -> None:
    words = vllm.words("v1/core", "v1/worker/gpu_worker.py")

    assert len(MEMORY_CAUSES) == 2
    for cause in MEMORY_CAUSES:
        assert any(cause in word for word in words)


def test_the_share_of_a_device_is_vllms(vllm: Source) -> None:
    default = f"gpu_memory_utilization: float = Field(default={VLLM_SHARE:g},"

    assert default in vllm.text("config/cache.py")


def test_text_only_models_are_detected(vllm: Source) -> None:
    found = text_architectures(vllm.package)

    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= found
    assert not {"Qwen2_5_VLForConditionalGeneration", *ENCODER_DECODERS} & found


def test_every_encoder_decoder_model_is_known(vllm: Source) -> None:
    registry = vllm.text("model_executor/models/registry.py")
    listed = registry.partition("# [Encoder-decoder]")[2].partition("\n}")[0]
    names = set(re.findall(r'"(\w+)": \(', listed))

    assert "WhisperForConditionalGeneration" in names
    assert names - ENCODER_DECODERS == set()


def test_a_cpu_computes_gated_delta_nets_in_bfloat16(vllm: Source) -> None:
    kernel = vllm.text("model_executor/layers/mamba/ops/cpu/gdn_attention.py")

    assert "CPU GDN attention requires BF16" in kernel


def test_instances_report_the_metrics_that_the_balance_reads(vllm: Source) -> None:
    words = vllm.words("v1/metrics")

    assert {RUNNING.decode(), WAITING.decode()} <= words


def test_kv_transfers_are_measured_by_the_metrics_that_vllm_reports(vllm: Source) -> None:
    words = vllm.words(f"{KV}/v1/nixl/stats.py")

    assert {name.decode().removesuffix("_sum") for name in (KV_BYTES, KV_SECONDS)} <= words
    assert EXTERNAL_TOKENS.removesuffix("_total") in vllm.words("v1/metrics/loggers.py")


def test_events_have_the_fields_that_the_proxy_reads(vllm: Source) -> None:
    for ours in (BlockStored, BlockRemoved, AllBlocksCleared, EventBatch):
        assert ours.__struct_fields__ == () or {*ours.__struct_fields__} <= fields(
            vllm.a_class("distributed/kv_events.py", ours.__name__)
        )
    pool = vllm.text("v1/core/block_pool.py")
    stored = pool.count("BlockStored(\n")
    assert pool.count("session_id=request.session_id") == stored > 0
    assert f'SESSION_ID_HEADER = "{SESSION}"' in vllm.text("entrypoints/generate/base/serving.py")


def test_a_session_is_used_for_nothing_but_events(vllm: Source) -> None:
    """The proxy sends its mark in its place."""
    using = {
        path.relative_to(vllm.package).as_posix()
        for path in vllm.files("v1")
        if re.search(r"\brequest\.session_id", path.read_text())
    }

    assert using == {"v1/core/block_pool.py", "v1/request.py"}


def test_models_with_placeholder_metadata_are_those_that_the_documents_name(vllm: Source) -> None:
    declared = {
        path.stem
        for folder in ("model_executor/models", "models")
        for path in vllm.files(folder)
        if re.search(
            r"^    embedding_fields\b.* = \{", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    page = (ROOT / "docs" / "decisions" / "001-metadata-only.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?`) \|", page.partition("## Which models")[2], re.MULTILINE)

    named = set(re.findall(r"`(\w+)`", " ".join(rows)))
    inherits = {"qwen3_omni_moe_thinker"} - declared  # Qwen2.5-Omni, from 0.33 on
    assert declared | inherits == named


def test_the_times_of_a_video_are_reported_by_models_that_write_them_into_the_prompt(
    vllm: Source,
) -> None:
    """For these models the proxy sends a video as metadata (`TIMESTAMPS` in `encoded.py`)."""
    declaring = [
        path.stem
        for folder in ("model_executor/models", "models")
        for path in vllm.files(folder)
        if f'"{TIMESTAMPS}": "metadata"' in path.read_text(encoding="utf-8")
    ]

    assert declaring == ["qwen3_vl"]
    assert f'timestamps = out_item["{TIMESTAMPS}"].data' in vllm.text(
        "model_executor/models/qwen3_vl.py"
    )


def test_releases_that_share_entries_convert_pictures_alike(vllm: Source) -> None:
    """Otherwise the encoder outputs of one picture, which have one key, would differ."""
    module = parsed(ROOT / "ec_store" / "vllm_connector" / "namespace.py")
    [layouts] = [ast.literal_eval(value) for name, value in assigned(module) if name == "LAYOUTS"]

    def layout(source: Source) -> object:
        release = ".".join(source.name.split(".")[:2])
        return layouts.get(release, release)

    def conversion(source: Source) -> str:
        [function] = [
            node
            for node in parsed(source.package / "multimodal" / "image.py").body
            if isinstance(node, ast.FunctionDef) and node.name == "convert_image_mode"
        ]
        return ast.unparse(function)

    sharing = [source for source in SOURCES if layout(source) == layout(vllm)]
    assert {conversion(source) for source in sharing} == {conversion(vllm)}
