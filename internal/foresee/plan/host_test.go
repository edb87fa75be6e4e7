package plan

import (
	"strings"
	"testing"
)

// The copy of the state for asynchronous checkpoints counts as host memory. auto leaves it out where it does not fit,
// and workers get that decision. true requires it.
func TestSnapshotsArePlanned(t *testing.T) {
	const name, copied = "llama-3.1-70b.yaml", 8 * 98 << 30
	for _, c := range []struct {
		assume, set  string
		fits, copies bool
	}{
		{"gpu=b300,gpus=8,ram=512G", "checkpoint.async=auto", true, false},
		{"gpu=b300,gpus=8,ram=512G", "checkpoint.async=false", true, false},
		{"gpu=b300,gpus=8,ram=512G", "checkpoint.async=true", false, true},
		{"gpu=b300,gpus=8,ram=2T", "checkpoint.async=auto", true, true},
		{"gpu=b300,gpus=8,ram=2T", "checkpoint.interval=0", true, false}, // the last checkpoint needs no copy
		{"gpu=b300,gpus=8,ram=512G,hosts=4", "checkpoint.async=true", true, true},
	} {
		on := gpus(t, c.assume+",cudnn=9.19.0")
		hosts := max(1, on.Hosts)
		cfg, m := fitted(t, name, 8*hosts, on, "data.seq_len=32K", c.set)
		if m.Fits != c.fits || (m.HostSnapshot > 0) != c.copies || c.copies && m.Host < copied/int64(hosts) {
			t.Errorf("%s, %s: a copy of %d bytes, %d in all; %s", c.assume, c.set, m.HostSnapshot, m.Host, m.Verdict())
		}
		if c.fits && cfg.Copies() != c.copies {
			t.Errorf("%s, %s: workers copy: %t", c.assume, c.set, cfg.Copies())
		}
		if waits := m.Waits() != ""; waits != (c.set == "checkpoint.async=auto" && !c.copies) {
			t.Errorf("%s, %s: %q", c.assume, c.set, m.Waits())
		}
		if !c.fits && !strings.Contains(m.Verdict(), "to fit, use checkpoint.async auto") {
			t.Errorf("%s, %s: %s", c.assume, c.set, m.Verdict())
		}
	}
}

// A model too large for one GPU gets the number of GPUs that is enough, and with less it does not fit.
func TestAdviceOnOneRank(t *testing.T) {
	on := gpus(t, "gpu=h100,gpus=1,cudnn=9.19.0")
	_, m := fitted(t, "llama-3.1-70b.yaml", 1, on)
	if m.Fits || !strings.Contains(m.Verdict(), "at least 8 ranks with memory.shard parameters") {
		t.Errorf("on one GPU: %s", m.Verdict())
	}
	for hosts, fits := range map[int]bool{4: false, 8: true} {
		on.Hosts = hosts
		if _, m := fitted(t, "llama-3.1-70b.yaml", hosts, on); m.Fits != fits {
			t.Errorf("on %d GPUs: %s", hosts, m.Verdict())
		}
	}
}

// Data in memory counts on every rank. While a process encodes it, the memory of later parts is free.
func TestDataIsPlanned(t *testing.T) {
	cfg := load(t, 2)
	of := func(data *Data) Memory {
		m, err := Fit(cfg, 2, onCPU(t, cfg).Machine, data)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	none := of(nil)
	if held := of(&Data{HeldBytes: 64 << 20}); held.HostData != 64<<20 || held.Host < none.Host+128<<20 {
		t.Errorf("64 MiB of data on 2 ranks: %d, in all %d after %d", held.HostData, held.Host, none.Host)
	}
	later := none.Activations + none.RingBuffers + none.HostSnapshot
	if m := of(&Data{EncodingBytes: later + 5}); m.HostData != 5 || none.HostSnapshot == 0 {
		t.Errorf("encoding beside %d bytes that come later takes %d more", later, m.HostData)
	}
}
