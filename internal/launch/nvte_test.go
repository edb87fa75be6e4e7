package launch

import (
	"strings"
	"testing"
)

func TestAttentionEnv(t *testing.T) {
	for _, c := range []struct {
		set  string
		want AttentionEnv
	}{
		{"", AttentionEnv{}},
		{"NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=1", AttentionEnv{}},
		{"NVTE_FLASH_ATTN=0", AttentionEnv{NoFlash: true}},
		{"NVTE_FUSED_ATTN=00", AttentionEnv{NoFused: true}},
		{"NVTE_DEBUG=1", AttentionEnv{}},
		{"NVTE_DEBUG_LEVEL=2", AttentionEnv{}},
		{"NVTE_DEBUG=0 NVTE_DEBUG_LEVEL=2", AttentionEnv{}},
		{"NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=0", AttentionEnv{}},
		{"NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1", AttentionEnv{Debug: 1}},
		{"NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2", AttentionEnv{Debug: 2}},
		{"NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=3", AttentionEnv{Debug: 2}},
		{"NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=-1", AttentionEnv{Debug: 2}},
		{"NVTE_DEBUG=2 NVTE_DEBUG_LEVEL=1", AttentionEnv{Debug: 2}},
		{"NVTE_FLASH_ATTN=2 NVTE_FUSED_ATTN=-1", AttentionEnv{}},
	} {
		if got, err := attentionEnv(lookupIn(c.set)); err != nil || got != c.want {
			t.Errorf("%q: %+v, %v; want %+v", c.set, got, err, c.want)
		}
	}
	for _, bad := range []string{"NVTE_FLASH_ATTN=", "NVTE_FLASH_ATTN=no", "NVTE_FUSED_ATTN=1.0",
		"NVTE_FUSED_ATTN=0x1", "NVTE_DEBUG=true", "NVTE_DEBUG_LEVEL=INFO", "NVTE_DEBUG_LEVEL=4294967296"} {
		name, _, _ := strings.Cut(bad, "=")
		if _, err := attentionEnv(lookupIn(bad)); err == nil || !strings.Contains(err.Error(), name) ||
			!strings.Contains(err.Error(), "want an integer") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	if _, err := attentionEnv(lookupIn("NVTE_DEBUG=x NVTE_FUSED_ATTN=y")); err == nil ||
		strings.Count(err.Error(), "want") != 2 {
		t.Errorf("two faults: %v", err)
	}
}

func lookupIn(set string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for _, pair := range strings.Fields(set) {
			if n, v, _ := strings.Cut(pair, "="); n == name {
				return v, true
			}
		}
		return "", false
	}
}

func TestHonoured(t *testing.T) {
	for _, name := range []string{envFlashAttn, envFusedAttn, envDebug, envDebugLevel} {
		t.Setenv(name, "1")
	}
	t.Setenv("NVTE_FUSED_ATTN", "0")
	line := Honoured()
	if !strings.HasPrefix(line, "environment: ") || !strings.Contains(line, "NVTE_FUSED_ATTN=0") ||
		strings.Contains(line, "TMPDIR") {
		t.Errorf("%q", line)
	}
	t.Setenv("NVTE_DEBUG", "a b\n")
	if line = Honoured(); !strings.Contains(line, `NVTE_DEBUG="a b\n"`) {
		t.Errorf("%q", line)
	}
}
