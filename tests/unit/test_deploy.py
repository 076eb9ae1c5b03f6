"""The deployment files: valid to the tools that read them, non-root, pinned, and sized to what they run."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tiered_cache.config import parse_size
from tiered_cache.errors import ConfigError
from tiered_cache.tiers.directory import Directory

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT.parent / "shared" / "crds"
KUBERAY = ROOT / "deploy" / "kuberay"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
RAY_UP = ROOT / "deploy" / "ray-up" / "cluster.yaml"
RAY_AND_ACTORS_BYTES = 2 << 30  # what a node needs beside its tiers and its object store

Json = Any  # a parsed YAML document


def load(path: Path) -> Json:
    return yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


def quantity_bytes(text: str | int) -> int:
    """A Kubernetes quantity such as 10Gi."""
    match = re.fullmatch(r"(\d+)(?:([KMGT])i)?", str(text))
    assert match, f"not a quantity of bytes: {text!r}"
    return int(match[1]) << {None: 0, "K": 10, "M": 20, "G": 30, "T": 40}[match[2]]


def strict(schema: Json) -> Json:
    """The schema with every object closed, as a server with strict field validation reads it."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


@functools.cache
def crd_schema(plural: str) -> Json:
    path = CRDS / f"ray.io_{plural}.yaml"
    if not path.exists():
        pytest.skip(f"KubeRay's definitions are not beside this checkout ({path.parent})")
    (v1,) = (version for version in load(path)["spec"]["versions"] if version["name"] == "v1")
    return strict(v1["schema"]["openAPIV3Schema"])


@pytest.mark.parametrize(
    ("name", "plural"), [("raycluster", "rayclusters"), ("rayjob", "rayjobs"), ("rayservice", "rayservices")]
)
def test_kuberay_file_is_valid(name: str, plural: str) -> None:
    jsonschema.validate(load(KUBERAY / f"{name}.yaml"), crd_schema(plural))


def test_the_schema_refuses_a_misspelt_field() -> None:
    """Without this the check above could pass because it checks nothing."""
    cluster = load(KUBERAY / "raycluster.yaml")
    container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    with pytest.raises(jsonschema.ValidationError, match="readinesProbe"):
        jsonschema.validate(cluster, crd_schema("rayclusters"))


def groups() -> dict[str, Json]:
    spec = load(KUBERAY / "raycluster.yaml")["spec"]
    return {"head": spec["headGroupSpec"]} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}


def pods() -> dict[str, Json]:
    submitter = load(KUBERAY / "rayjob.yaml")["spec"]["submitterPodTemplate"]["spec"]
    return {name: group["template"]["spec"] for name, group in groups().items()} | {"submitter": submitter}


@pytest.mark.parametrize("pod", [pytest.param(pod, id=name) for name, pod in pods().items()])
def test_pod_meets_the_restricted_security_standard(pod: Json) -> None:
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]) & set(container["resources"]["limits"])
    assert not any("hostPath" in volume for volume in pod.get("volumes", []))


def entrypoint() -> list[str]:
    return str(load(KUBERAY / "rayjob.yaml")["spec"]["entrypoint"]).split()


def option(name: str) -> str:
    words = entrypoint()
    return words[words.index(name) + 1]


@pytest.mark.parametrize("group", [pytest.param(group, id=name) for name, group in groups().items()])
def test_node_has_room_for_what_the_job_asks_of_it(group: Json) -> None:
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    size = {volume["name"]: quantity_bytes(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"]}
    mount = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    shared_memory = size[mount["/dev/shm"]]
    object_store = int(group["rayStartParams"]["object-store-memory"])
    assert object_store < shared_memory
    assert shared_memory + parse_size(option("--host-bytes")) + RAY_AND_ACTORS_BYTES <= quantity_bytes(limits["memory"])
    assert container["resources"]["requests"]["memory"] == limits["memory"], "an over-committed node kills the tier"

    (volume,) = (size[name] for path, name in mount.items() if Path(option("--disk-dir")).is_relative_to(path))
    assert parse_size(option("--disk-bytes")) < volume < quantity_bytes(limits["ephemeral-storage"])
    assert container["readinessProbe"]["httpGet"]["path"] == "/api/healthz"


def test_disk_tier_accepts_its_place_below_the_volume(tmp_path: Path) -> None:
    """Kubernetes gives the root of an emptyDir to everyone, and to the pod's group: mode 2777."""
    tmp_path.chmod(0o2777)
    below = Path(option("--disk-dir")).relative_to("/var/lib/tiered-cache")
    Directory(tmp_path / below).close()
    with pytest.raises(ConfigError, match="mode 2777"):
        Directory(tmp_path / "frames")


def test_job_runs_the_replay_on_the_cluster_beside_it() -> None:
    job, cluster = load(KUBERAY / "rayjob.yaml"), load(KUBERAY / "raycluster.yaml")
    assert entrypoint()[:2] == ["tiered-cache", "replay"]
    assert option("--ray") == "auto"
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert int(option("--workers")) == sum(group["replicas"] for group in cluster["spec"]["workerGroupSpecs"])
    assert cluster["spec"]["authOptions"] == {"mode": "token"}


def test_service_runs_the_application_on_nodes_like_those_of_the_cluster() -> None:
    """With settings that it takes, the image that has its extra, and the same room."""
    spec = load(KUBERAY / "rayservice.yaml")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, _, builder = application["import_path"].partition(":")
    getattr(importlib.import_module(module), builder)(application["args"])  # raises for what is no setting
    cluster = load(KUBERAY / "raycluster.yaml")["spec"]
    text = json.dumps(spec["rayClusterConfig"]).replace("tiered-cache:0.1.0-serve", "tiered-cache:0.1.0")
    assert json.loads(text.replace(', {"name": "serve", "containerPort": 8000}', "")) == cluster
    for name in ("host_bytes", "disk_dir", "disk_bytes"):
        assert str(application["args"][name]) == option(f"--{name.replace('_', '-')}")
    assert application["args"]["workers"] == int(option("--workers"))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), comments dropped and continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and line.lstrip()[0] != "#"]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in joined)]


def arguments(instruction: str) -> list[str]:
    return [rest for word, rest in instructions() if word == instruction]


def test_every_base_image_is_pinned_to_a_patch_release() -> None:
    bases = [base.split()[0] for base in arguments("FROM")]
    assert len(set(bases)) == 1, f"the stages must agree on Python: {bases}"
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+", bases[0]), bases[0]


def test_the_image_runs_as_a_numbered_user_who_is_not_root() -> None:
    words = [word for word, _ in instructions()]
    last_stage = words[len(words) - words[::-1].index("FROM") :]
    assert last_stage.count("USER") == 1
    assert not {"RUN", "COPY", "ADD"} & set(last_stage[last_stage.index("USER") :]), "nothing is built after USER"
    (user,) = arguments("USER")
    pod_user = load(KUBERAY / "raycluster.yaml")["spec"]["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert user == f"{pod_user['runAsUser']}:{pod_user['runAsGroup']}"
    assert pod_user["runAsUser"] > 0
    assert f"--uid {pod_user['runAsUser']}" in DOCKERFILE.read_text()


def test_the_image_copies_what_is_there_and_downloads_through_pip_alone() -> None:
    for copy_arguments in arguments("COPY"):
        if copy_arguments.startswith("--from="):
            continue
        *sources, _ = copy_arguments.split()
        missing = [source for source in sources if not (ROOT / source).exists()]
        assert not missing, f"COPY of what is not in the repository: {missing}"
    assert not arguments("ADD"), "ADD can fetch and unpack; COPY says what it does"
    assert not re.search(r"\b(curl|wget|apt-get|sudo|chmod 777)\b", "\n".join(arguments("RUN")))


def test_the_image_installs_every_package_and_only_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {word for line in arguments("COPY") for word in line.split()}
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied
    named = re.findall(r"--build-arg EXTRAS=(\w+)", DOCKERFILE.read_text())
    assert named == ["cuda12", "serve"]
    assert set(named) <= set(project["project"]["optional-dependencies"])


def test_ray_accepts_the_ray_up_file() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    prepared = util.prepare_config(load(RAY_UP))
    util.validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["max_workers"] == len(prepared["provider"]["worker_ips"])

    broken = copy.deepcopy(prepared)
    broken["head_setup_comands"] = []
    with pytest.raises(jsonschema.ValidationError, match="head_setup_comands"):
        util.validate_config(broken)


def test_ray_up_is_private_and_mounts_what_is_there() -> None:
    config = load(RAY_UP)
    assert config["auth"]["ssh_user"] != "root"
    starts = [c for c in config["head_start_ray_commands"] + config["worker_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert all(re.search(r"--object-store-memory=\d+", command) for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    sources = [source for source in config["file_mounts"].values() if not source.startswith("~")]
    missing = [source for source in sources if not (ROOT / source).exists()]
    assert sources
    assert not missing, f"mounts of what is not in the repository: {missing}"


def test_versions_agree_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    files = [DOCKERFILE, RAY_UP, *KUBERAY.glob("*.yaml")]
    text = "\n".join(path.read_text() for path in files)
    assert set(re.findall(r"tiered-cache:([\w.]+)", text)) == {version}
    (ray,) = re.findall(r"ARG RAY_VERSION=(\S+)", DOCKERFILE.read_text())
    assert load(KUBERAY / "raycluster.yaml")["spec"]["rayVersion"] == ray
    assert set(re.findall(r"ray\[default\]==([\d.]+)", RAY_UP.read_text())) == {ray}
    assert "latest" not in text
