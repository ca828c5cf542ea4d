"""Generates the stubs in src/wald/v1, from the proto files of the repository or of the sdist, and src/wald/sync.py from the asyncio client."""

import re
import runpy
import shutil
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateStubs(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version, build_data):
        root = Path(self.root)
        repository = root.parent.parent
        proto = next(
            (path for path in (root / "proto", repository / "proto") if (path / "wald/v1").is_dir()), None
        )
        if proto is None:
            raise FileNotFoundError("no proto files, neither here nor in the repository around client/python")
        if self.target_name == "sdist":
            build_data["force_include"][str(proto / "wald")] = "proto/wald"
            license = next(path for path in (root / "LICENSE", repository / "LICENSE") if path.is_file())
            build_data["force_include"][str(license)] = "LICENSE"
        else:
            generate(proto, root / "src")
            runpy.run_path(str(root / "generate_sync.py"))["write"]()


def generate(proto, out):
    """The proto package is wald.v1, so the generated code lies inside the package and imports itself as such."""
    # The generator is only there while building.
    import grpc_tools
    from grpc_tools import protoc

    stubs = out / "wald/v1"
    shutil.rmtree(stubs, ignore_errors=True)
    files = sorted(str(path.relative_to(proto)) for path in proto.glob("wald/v1/*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{proto}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *files,
        ]
    )
    if status:
        raise RuntimeError(f"protoc failed with status {status}")
    for path in sorted(stubs.glob("*_pb2.py")):
        remove(path, _RUNTIME_IMPORT, _RUNTIME_CHECK)
    for path in sorted(stubs.glob("*_pb2_grpc.py")):
        remove(path, _GRPC_CHECK)
    (stubs / "__init__.py").write_text('"""The stubs, generated."""\n')


# Generated code refuses to run with a grpcio or protobuf that is older than the generator, or with a protobuf that is two major
# versions newer. The code itself does not need this: it is a serialized descriptor, and calls that all supported versions have.
# An older generator without these checks (grpcio-tools 1.62) has no wheel for Python 3.13 and later.
_RUNTIME_IMPORT = r"^from google\.protobuf import runtime_version as _runtime_version\n"
_RUNTIME_CHECK = r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?: .*\n)+\)\n"
_GRPC_CHECK = r"^GRPC_GENERATED_VERSION = (?:.*\n)+?if _version_not_supported:\n    raise RuntimeError\(\n(?: .*\n)+    \)\n"


def remove(path, *patterns):
    """Removes each pattern from a generated file. Another generator could need other patterns, so each must be found once."""
    text = path.read_text(encoding="utf-8")
    for pattern in patterns:
        text, found = re.subn(pattern, "", text, flags=re.M)
        if found != 1:
            raise RuntimeError(f"{path.name}: the generator's check of versions has another form: {pattern}")
    path.write_text(text, encoding="utf-8")
