package key

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What unmunge 0.5.15 prints.
const unmunged = `STATUS:          Success (0)
ENCODE_HOST:     node01 (10.77.0.1)
ENCODE_TIME:     2026-11-22 13:46:08 +0000 (1795355168)
DECODE_TIME:     2026-11-22 13:46:08 +0000 (1795355168)
TTL:             300
CIPHER:          aes128 (4)
MAC:             sha256 (5)
ZIP:             none (0)
UID:             ada (1000)
GID:             users (100)
UID_RESTRICTION: ada (1000)
LENGTH:          3

a
b`

func TestParseUnmunge(t *testing.T) {
	payload, uid, err := parseUnmunge([]byte(unmunged))
	if string(payload) != "a\nb" || uid != 1000 || err != nil {
		t.Errorf("%q of %d, %v", payload, uid, err)
	}
	for name, out := range map[string]string{
		"nothing":          "",
		"no payload":       strings.Split(unmunged, "\n\n")[0],
		"a failure":        strings.Replace(unmunged, "Success (0)", "Replayed credential (17)", 1),
		"no user":          strings.Replace(unmunged, "UID:  ", "GID:  ", 1),
		"two users":        "UID: root (0)\n" + unmunged,
		"a user of words":  strings.Replace(unmunged, "ada (1000)\nGID", "ada\nGID", 1),
		"success below":    "STATUS: Expired credential (15)\nUID: ada (1000)\n\nSTATUS:          Success (0)\n",
		"a user below":     "STATUS: Success (0)\n\nUID: ada (1000)\n",
		"a terminal's end": "STATUS: \x1b[2J\n\n",
	} {
		if payload, uid, err := parseUnmunge([]byte(out)); err == nil {
			t.Errorf("%s: %q of %d", name, payload, uid)
		} else if strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%s: %q", name, err)
		}
	}
}

func FuzzUnmunge(f *testing.F) {
	f.Add([]byte(unmunged))
	f.Fuzz(func(t *testing.T, out []byte) {
		payload, uid, err := parseUnmunge(out)
		if err == nil && (uid < 0 || len(payload) > len(out)) {
			t.Fatalf("user %d, %d bytes", uid, len(payload))
		}
	})
}

// programs are a munge and an unmunge of a directory, first in PATH.
func programs(t *testing.T, munge, unmunge string) *Munge {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"munge": munge, "unmunge": unmunge} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	m, err := FindMunge()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMungePrograms(t *testing.T) {
	m := programs(t, `test "$1" = "--restrict-uid=$(id -u)" || exit 1; printf 'MUNGE:%s:\n' "$(cat)"`,
		`printf 'STATUS: Success (0)\nUID: me (7)\n\n%s' "$(cat)"`)
	cred, err := m.Vouch(t.Context(), []byte("hash"))
	if err != nil || string(cred) != "MUNGE:hash:" {
		t.Fatalf("%q, %v", cred, err)
	}
	if payload, uid, err := m.Open(t.Context(), cred); string(payload) != "MUNGE:hash:" || uid != 7 || err != nil {
		t.Errorf("%q of %d, %v", payload, uid, err)
	}

	m = programs(t, `echo 'munge: Error: Failed to access "/run/munge": no daemon' >&2; exit 6`, `head -c 1000000 /dev/zero`)
	if _, err := m.Vouch(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "no daemon") || !strings.Contains(err.Error(), "status 6") {
		t.Error(err)
	}
	if _, _, err := m.Open(t.Context(), nil); err == nil || len(err.Error()) > 2000 {
		t.Error(err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := FindMunge(); err == nil || !strings.Contains(err.Error(), "munge is not on this node") {
		t.Error(err)
	}
}
