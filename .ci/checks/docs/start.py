"""The first of the two commands, as a newcomer types it: `cargo run --release` starts the daemon
on a terminal, prints its address and a command to try. That command works, and SIGTERM ends
the daemon with 0. Needs ports 6925 and 6926 free.
"""

import json
import re
import shlex

from common import *


@check("cargo run --release, as a newcomer types it: address, suggested command, clean end")
def start(directory):
    # Below the repository, so that cargo finds the workspace and ./wald-data goes away.
    terminal = Terminal("cargo", "run", "--release", cwd=directory, env=clean_environment())
    served = terminal.wait_for("try: ", 1200) and terminal.wait_for("wald.v1.WalService/Append", 5)
    if not expect("cargo run --release serves", served, "" if served else terminal.text[-500:]):
        return
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text)
    start = [line for line in text.splitlines() if "wald is serving" in line][0]
    expect("it says where gRPC listens", "grpc=127.0.0.1:6925" in start)
    expect("it says where HTTP listens", "http=127.0.0.1:6926" in start)
    expect("it says where the data is", "data_dir=./wald-data" in start and (Path(directory) / "wald-data").is_dir())
    tried = re.search(r"try: (grpcurl .*)", text)[1].strip()
    done = run(grpcurl(), *shlex.split(tried)[1:])
    expect("the suggested command works", done.returncode == 0 and json.loads(done.stdout)["lsn"] == "0", tried)
    terminal.process.send_signal(signal.SIGTERM)
    expect("SIGTERM ends it with 0", terminal.ended() == 0)
    expect("it says that everything is safe", "everything accepted is on the device" in terminal.text)
