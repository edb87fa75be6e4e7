"""Connects to the socket from which the agents of this host get a key, and prints how many bytes come. knock.py UID does it as
that user."""
import os
import re
import socket
import sys
import time

for _ in range(50):
    names = re.findall(r"@(cprun-key-\S+)", open("/proc/net/unix").read())
    if names:
        break
    time.sleep(0.1)
if len(sys.argv) > 1:
    os.setuid(int(sys.argv[1]))
s = socket.socket(socket.AF_UNIX)
s.settimeout(5)
s.connect("\0" + names[0])
try:
    got = s.recv(100)
except ConnectionResetError:
    got = b""
print(f"got {len(got)} bytes")
