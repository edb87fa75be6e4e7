"""Checks what no schema can: that the numbers and names of an indexed Job and its Service fit together."""
import sys

import yaml


def main():
    service, job = yaml.safe_load_all(open(sys.argv[1]))
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    args = dict(a[2:].split("=", 1) for a in container["args"] if a.startswith("--"))
    host, port = args["rendezvous"].split(":")
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    env = {e["name"]: e["value"] for e in container["env"]}
    secrets = [v for v in pod["volumes"] if "secret" in v]
    facts = {
        "completions, parallelism and --nnodes are one number": {spec["completions"], spec["parallelism"], int(args["nnodes"])} == {spec["completions"]},
        "the rendezvous is the first pod": host == f"{name}-0.{pod['subdomain']}",
        "the subdomain is the Service": pod["subdomain"] == service["metadata"]["name"],
        "the Service selects the pods of the Job": service["spec"]["selector"] == {"job-name": name},
        "the Service names the port": int(port) in [p["port"] for p in service["spec"]["ports"]],
        "every volume is mounted": set(mounts) == {v["name"] for v in pod["volumes"]},
        "the key's path lies in its volume": env["CPRUN_KEY_FILE"].startswith(mounts[secrets[0]["name"]] + "/"),
        "nobody but the pod reads the key": len(secrets) == 1 and secrets[0]["secret"]["defaultMode"] in (0o400, 0o600),
        "no key stands in the environment": not any("valueFrom" in e for e in container["env"]),
    }
    wrong = [fact for fact, holds in facts.items() if not holds]
    for fact in wrong:
        print(f"{sys.argv[1]}: not so: {fact}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print(f"{sys.argv[1]}: {len(facts)} facts hold")


if __name__ == "__main__":
    main()
