"""Settings: flag over variable over file over default, each shown with its origin. A typo is reported with
the nearest key. One table documents all of them, in --help, the reference, the man page and the
completions.
"""

import tomllib

from common import *


def shown(*arguments, **env):
    """`wald config show`: name -> (value, origin)."""
    done = run(WALD, "config", "show", *arguments, env=clean_environment(**env))
    if done.returncode != 0:
        raise SystemExit(done.stderr.decode())
    found = {}
    for line in done.stdout.decode().splitlines():
        match = re.match(r"(\w+)\s*=\s*(.*?)\s*# (.*)$", line)
        if match:
            found[match[1]] = match[2].strip('"'), match[3]
    return found


def refused(text, *words, arguments=(), **env):
    """Whether `wald config check` refuses a file with these words, and its last line."""
    with scratch() as directory:
        file = Path(directory) / "wald.toml"
        file.write_text(text)
        done = run(WALD, "config", "check", "--config", file, *arguments, env=clean_environment(**env))
    said = done.stderr.decode()
    return done.returncode == 78 and all(word in said for word in words), said.strip().splitlines()[-1:] or done.returncode


@check("Flag over variable over file over default, each shown with its origin")
def precedence(directory):
    file = directory / "wald.toml"
    file.write_text('segment_bytes = "1MiB"\nsync_mode = "batch"\nmax_inflight_bytes = "8MiB"\n')
    layers = [((), {}, ("16MiB", "default")), (("--config", file), {}, ("1MiB", "file")),
              (("--config", file), {"WALD_SEGMENT_BYTES": "2MiB"}, ("2MiB", "environment")),
              (("--config", file, "--segment-bytes", "4MiB"), {"WALD_SEGMENT_BYTES": "2MiB"}, ("4MiB", "flag"))]
    for arguments, env, (value, origin) in layers:
        got = shown(*arguments, **env)["segment_bytes"]
        expect(f"segment_bytes is {value}, from the {origin}", got[0] == value and origin in got[1].lower().replace(
            "wald_segment_bytes", "environment").replace(str(file), "file").replace("--segment-bytes", "flag"), got)
    both = shown("--config", file, WALD_MAX_INFLIGHT_BYTES="16MiB")
    expect("each setting has its own origin", both["sync_mode"][0] == "batch" and both["max_inflight_bytes"][0] == "16MiB"
           and len({both[name][1] for name in ("sync_mode", "max_inflight_bytes", "listen")}) == 3,
           {name: both[name] for name in ("sync_mode", "max_inflight_bytes", "listen")})
    data = directory / "data"
    with Daemon(data, "--config", file) as daemon:
        # The daemon must use the settings shown: its start message and the size of its files prove it.
        daemon.ready()
        sizes = {path.stat().st_size for path in (data / "journal").iterdir()}
        expect("the daemon uses the settings shown", daemon.start["sync_mode"] == "batch" and sizes == {1 << 20}, sizes)


@check("A typo is reported with the nearest key")
def mistakes():
    for text, words in (('segment_byte = "1MiB"', ["segment_byte", "segment_bytes"]),
                        ('max_infligt_bytes = "1MiB"', ["max_infligt_bytes", "max_inflight_bytes"]),
                        ('sync_mod = "batch"', ["sync_mod", "sync_mode"])):
        holds, said = refused(text, *words)
        expect(f"a typo ({words[0]}) names the nearest key, and is code 78", holds, said)
    for text, words in (('segment_bytes = "63KiB"', ["segment_bytes", "64KiB"]),
                        ('sync_mode = "sometimes"', ["sync_mode"]),
                        ('sync_interval = "5"', ["sync_interval"]),
                        ('listen = "0.0.0.0:6925"', ["listen", "insecure"])):
        holds, said = refused(text, *words)
        expect(f"{text} is refused by name, with code 78", holds, said)
    for contradiction, *words in [('max_batch_bytes = "8MiB"', "max_batch_bytes", "raise segment_bytes"),
                                  ('max_record_bytes = "5MiB"', "max_record_bytes", "max_batch_bytes"),
                                  ('segment_bytes = "256MiB"\nmax_batch_bytes = "65MiB"', "max_batch_bytes", "63MiB")]:
        holds, said = refused(contradiction, *words)
        expect(f"{contradiction!r} is refused", holds, said)
    holds, said = refused('segment_bytes = "63KiB"\nsync_mode = "sometimes"\nreader_threds = 3\n', "sync_mode", "reader_threads")
    expect("all mistakes are reported together", holds, said)
    done = run(WALD, "config", "check")
    expect("usable settings give code 0", done.returncode == 0)
    done = run(WALD, "--segment-byte", "1MiB")
    expect("a flag that does not exist is code 2, with the nearest", done.returncode == 2 and b"--segment-bytes" in done.stderr)
    done = run(WALD, "config", "check", env=clean_environment(WALD_SEGMENT_BYTE="1MiB"))
    expect("a misspelt variable is warned of", done.returncode == 0 and b"WALD_SEGMENT_BYTES" in done.stderr)


@check("One table documents all settings: help, reference, man page, completions")
def documented():
    names = set(shown())
    # The reference is a file: without its comment marks it sets every key to its default.
    reference = run(WALD, "config", "reference").stdout.decode()
    keys = dict(re.findall(r"^# (\w+) = (.*)$", reference, re.M))
    expect("the reference has every setting", set(keys) == names, len(names))
    settings = tomllib.loads("".join(f"{key} = {value}\n" for key, value in keys.items()))
    expect("and is a valid file of the defaults", set(settings) == names)
    with scratch() as directory:
        file = Path(directory) / "wald.toml"
        # Some builds lack otlp; an empty endpoint is still the default.
        file.write_text("".join(f"{key} = {value}\n" for key, value in keys.items()))
        from_file = shown("--config", file)
        expect("which changes nothing", {name: value for name, (value, _) in from_file.items()}
               == {name: value for name, (value, _) in shown().items()})
    paragraphs = dict((name, " ".join(line.lstrip("# ") for line in text.strip().splitlines()))
                      for text, name in re.findall(r"((?:^# .*\n)+)# (\w+) = .*$", reference, re.M))
    text = " ".join(run(WALD, "--help", env=clean_environment(COLUMNS="500")).stdout.decode().split())
    man = " ".join(run(WALD, "man").stdout.decode().replace("\\-", "-").replace("\\&", "").replace("\\*(Aq", "'").split())
    bash = run(WALD, "completion", "bash").stdout.decode()
    flag = lambda name: "--" + name.replace("_", "-")
    expect("--help documents each with the same words",
           all(flag(name) in text and " ".join(paragraphs[name].split()) in text for name in names),
           [name for name in names if " ".join(paragraphs[name].split()) not in text][:3])
    expect("so does the man page", all(flag(name) in man for name in names)
           and sum(" ".join(paragraphs[name].split())[:60] in man for name in names) == len(names),
           [name for name in names if " ".join(paragraphs[name].split())[:60] not in man][:3])
    expect("completions know every flag", all(flag(name) in bash for name in names))
