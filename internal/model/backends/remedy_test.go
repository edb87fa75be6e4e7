package backends

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// checkChoice checks the invariants of every choice.
func checkChoice(t *testing.T, p Params) {
	t.Helper()
	c, err := Select(p)
	again, errAgain := Select(p)
	if !reflect.DeepEqual(c, again) || (err == nil) != (errAgain == nil) {
		t.Fatalf("%+v: two selections differ", p)
	}
	var none *NoBackendError
	if errors.As(err, &none) {
		if len(none.Rejected) == 0 || none.Error() == "" {
			t.Fatalf("%+v: refused without a rule", p)
		}
		for _, r := range none.Rejected {
			if r.Reason == "" || r.Fix == "" || !strings.Contains(none.Error(), " "+r.Rule) && p.Want == Auto {
				t.Fatalf("%+v: the error does not explain %s", p, r.Rule)
			}
		}
		return
	}
	if err != nil {
		return // invalid parameters
	}
	if p.Want != Auto && c.Backend != p.Want {
		t.Fatalf("%+v: chose %s", p, c.Backend)
	}
	if !slices.Contains(c.Able, c.Backend) || c.Reason == "" {
		t.Fatalf("%+v: chose %s, able are %v, reason %q", p, c.Backend, c.Able, c.Reason)
	}
	checkCured(t, c)
	for _, b := range Backends {
		v := evaluate(b, c.Params, c.Hops)
		for _, id := range v.blocked {
			if !slices.ContainsFunc(v.rejections, func(r Rejection) bool { return r.Rule == id }) {
				t.Fatalf("%+v: %s is said to block %s and is not among the rejections", p, id, b)
			}
		}
	}
	var out strings.Builder
	c.Explain(&out, 2)
	if !strings.Contains(out.String(), c.Backend.String()) {
		t.Fatalf("explained without the choice: %s", &out)
	}
}

// checkCured replays the remedies of a choice on its hops. With these remedies alone, no rule rejects any call.
func checkCured(t *testing.T, c *Choice) {
	t.Helper()
	work := slices.Clone(c.Hops)
	for steps := 0; len(work) > 0; steps++ {
		at := work[0]
		bad := rejecting(c.Backend, &at)
		if len(bad) == 0 {
			work = work[1:]
			continue
		}
		rule, calls := firstRemedy(bad, at)
		known := slices.ContainsFunc(c.Remedies, func(a Applied) bool { return rule != nil && a.Rule == rule.ID })
		if calls == nil || !known || steps > 10000 {
			t.Fatalf("%+v: %s chosen, and %v speaks in %s", c.Params, c.Backend, bad[0].ID, &at)
		}
		work = append(slices.Clone(calls), work[1:]...)
	}
}

func TestRandomChoicesHold(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 16))
	remedied := map[string]int{}
	for range 5000 {
		p := randomParams(rng)
		p.Want = Backend(rng.IntN(4))
		checkChoice(t, p)
		_, kinds := outcomeOf(t, p)
		for _, k := range kinds {
			remedied[k]++
		}
	}
	for _, k := range []RemedyKind{SplitCall, ZeroWorkspace, GrantWorkspace} {
		if remedied[string(k)] == 0 {
			t.Errorf("remedy %s was never applied", k)
		}
	}
}

func FuzzSelect(f *testing.F) {
	rng := rand.New(rand.NewPCG(17, 18))
	for range 40 {
		b := make([]byte, 64)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) { checkChoice(t, fuzzParams(b)) })
}

// fuzzParams reads parameters, valid or not, from bytes.
func fuzzParams(b []byte) Params {
	next := func() int {
		if len(b) < 2 {
			return 0
		}
		n := int(int16(binary.LittleEndian.Uint16(b)))
		b = b[2:]
		return n
	}
	few := func(n int) int { return (next()%n + n) % n }
	small := func() int { return next() % 300 }
	return Params{
		ScaleNotAbove0: few(9) == 0,
		Arch:           []int{0, 75, 80, 86, 90, 100, 103, 110, 120, 1000}[few(10)],
		CUDNN:          V(8+few(2), few(30), few(5)), Flash: Version(few(2)),
		//lint:ignore SA4000 these are two draws
		Disabled: uint8(few(256) & few(256)), Want: Backend(few(6)),
		DType: tensor.DType(few(9)), Memory: int64(next()),
		Batch: few(4), SeqQ: next(), SeqKV: next(), Heads: few(40), KVHeads: few(10), HeadDim: small(),
		HeadDimV: small(),
		Causal:   few(2) == 0, WindowLeft: small(), WindowRight: small(), Softcap: few(9) == 0, Sink: few(5) == 0,
		Bias: few(4) == 0, Documents: few(3) == 0,
		Training: few(2) == 0, Deterministic: few(2) == 0,
		ContextSize: few(12) - 1, InnerSize: few(5) - 1,
		Algorithm: []string{"", "ring", "allgather", "ulysses", "hierarchical", "tree"}[few(6)],
		Layout:    []partition.LayoutName{"", "zigzag", "striped", "contiguous", "document", "spiral"}[few(6)],
	}
}

func TestNoBackendErrorListsAll(t *testing.T) {
	msg := refused(t, with("cp=2 cudnn=9.0.0 flash=none off=flash docs=1 window=9")).Error()
	for _, want := range []string{
		"no attention backend", "fused-documents-9.1.0", "flash-not-built", "flash-disabled",
		`in hop "documents"`, "Fix: Install cuDNN",
	} {
		if !strings.Contains(msg, want) {
			t.Errorf("%q is not in:\n%s", want, msg)
		}
	}
}

func TestExplain(t *testing.T) {
	c := chosen(t, with("cudnn=9.19.0 window=512 want=fused cp=2 off=flash"))
	said := func(level int) string {
		var b strings.Builder
		c.Explain(&b, level)
		return b.String()
	}
	if said(0) != "" {
		t.Errorf("level 0 says %q", said(0))
	}
	if s := said(1); !strings.Contains(s, "attention: fused") || !strings.Contains(s, "split-call") {
		t.Errorf("level 1 says %q", s)
	}
	for _, want := range []string{"sm90, cuDNN 9.19.0", "[1 4096 16 128]", "flash-disabled", "off-diagonal band",
		"able: fused"} {
		if !strings.Contains(said(2), want) {
			t.Errorf("level 2 has no %q:\n%s", want, said(2))
		}
	}
}

// TestRulesAreWellFormed checks that ids are unique and in kebab case, and that reason and fix are one sentence each.
func TestRulesAreWellFormed(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Rules() {
		if seen[r.ID] || !strings.HasPrefix(r.ID, r.Backend.String()+"-") ||
			strings.Trim(r.ID, "abcdefghijklmnopqrstuvwxyz0123456789-.") != "" {
			t.Errorf("id %q is taken, has no backend or is not in kebab case", r.ID)
		}
		seen[r.ID] = true
		for _, s := range []string{r.Reason, r.Fix} {
			if !strings.HasSuffix(s, ".") || strings.Count(s, ". ") > 0 {
				t.Errorf("%s: %q is not one sentence", r.ID, s)
			}
		}
		if r.Until != 0 && r.Until <= r.Since {
			t.Errorf("%s: versions %s to %s", r.ID, r.Since, r.Until)
		}
	}
}

// The orders ascend, and no GPU's order has the reference.
func TestOrders(t *testing.T) {
	for i, o := range orders {
		if i > 0 && (o.since <= orders[i-1].since || slices.Contains(o.backends, Reference)) || orders[0].since != 0 {
			t.Errorf("order from %d has %v", o.since, o.backends)
		}
	}
	for arch, want := range map[int]int{0: 0, 80: 1, 89: 1, 90: 1, 100: 91, 120: 91} {
		if got := orderOf(arch).since; got != want {
			t.Errorf("sm%d has the order from sm%d", arch, got)
		}
	}
}

func TestWorkspace(t *testing.T) {
	for params, want := range map[string]int64{
		"want=flash":                               0,
		"train=0":                                  0,
		"want=fused h=2 s=1024":                    4*2*1024*128 + 4*2*1024,
		"want=fused h=2 s=1000 batch=3 d=64":       3 * (4*2*1000*64 + 4*2*1000),
		"want=fused h=2 s=1024 cp=2":               4*2*512*128 + 4*2*512,
		"want=fused h=4 g=2 s=1024 docs=1":         4*4*1024*128 + 4*4*1024 + 4*4*1024*256,
		"want=fused h=2 s=1000 det=1 cudnn=9.24.0": 4*2*1000*128 + 4*2*1000 + 2*2*1024*1024,
		"want=fused h=2 s=1000 det=1 cudnn=9.25.0": 4*2*1000*128 + 4*2*1000,
		"want=fused h=2 s=1088 det=1":              4*2*1088*128 + 4*2*1088 + 2*2*1152*1152, // in blocks of 128
		"want=fused h=4 g=2 s=1024 det=1":          4*4*1024*128 + 4*4*1024 + 2*4*1024*1024,
	} {
		if got := chosen(t, with(params)).Workspace(); got != want {
			t.Errorf("%s: workspace of %d bytes, want %d", params, got, want)
		}
	}
}
