package backends

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Rejection is one rule that rejects one backend.
type Rejection struct {
	Backend Backend
	Rule    string // the rule's id
	Reason  string
	Fix     string
	// Hop names the kernel call that the rule rejects, such as "half keys"; it is empty for a rule
	// compare the run as a whole. Example is one such call, with its rank, its lengths and its mask.
	Hop     string
	Example string
	Remedy  *Remedy // nil: none
}

// Applied is a remedy that the choice relies on: the caller must carry it out.
type Applied struct {
	*Remedy
	Rule string // the rule that asked for it
	Hop  string // as in Rejection
	More string // about Text: " (3 calls)"
	// Calls replace the call, the first one of a hop of that name.
	Calls []Call
}

// Choice is the outcome of a selection. It is shared between callers and read only.
type Choice struct {
	Backend Backend
	Reason  string
	// Rejected lists every rule that rejects a backend that was not chosen, with a remedy or without; Remedies lists
	// the remedies of the chosen one.
	Rejected []Rejection
	Remedies []Applied
	// Able lists the backends that could run this, in the order of preference. Named could too, but auto does not
	// take them on this machine: they run only if named.
	Able   []Backend
	Named  []Backend
	Params Params
	Hops   []Call
}

// NoBackendError reports that no permitted backend can run the attention.
type NoBackendError struct {
	Want     Backend // Auto: all were tried
	Params   Params
	Rejected []Rejection
	Named    []Backend // can run it, but only if named: auto does not take them
}

// Error lists the rules that reject the backend that was named, or every backend, with their fixes.
func (e *NoBackendError) Error() string {
	var b strings.Builder
	if e.Want == Auto {
		b.WriteString("no attention backend can run this:")
	} else {
		fmt.Fprintf(&b, "attention backend %s cannot run this:", e.Want)
	}
	for _, r := range e.Rejected {
		if e.Want == Auto || r.Backend == e.Want {
			fmt.Fprintf(&b, "\n  %s", r)
		}
	}
	for _, n := range e.Named {
		reason, fix := NamedOnly(n, e.Params.Arch)
		fmt.Fprintf(&b, "\n  %s: %s Fix: %s", n, reason, fix)
	}
	return b.String()
}

// NamedOnly returns why auto does not take a backend that could run this, and what does, as the reason and
// the fix of a rule.
func NamedOnly(b Backend, arch int) (reason, fix string) {
	return fmt.Sprintf("It can run this, slowly; auto does not take it on %s.", archName(arch)),
		fmt.Sprintf("Set attention.backend to %s.", b)
}

func (r Rejection) String() string {
	hop := ""
	if r.Hop != "" {
		hop = fmt.Sprintf(" in hop %q (%s)", r.Hop, r.Example)
	}
	return fmt.Sprintf("%s: %s%s: %s Fix: %s", r.Backend, r.Rule, hop, r.Reason, r.Fix)
}

// Kinds returns the kinds of the remedies that the choice relies on, each once, in order: the device gets them.
func (c *Choice) Kinds() []RemedyKind { return KindsOf(c.Remedies) }

// KindsOf returns the kinds of remedies, each once, in order.
func KindsOf(applied []Applied) []RemedyKind {
	var kinds []RemedyKind
	for _, a := range applied {
		kinds = append(kinds, a.Kind)
	}
	slices.Sort(kinds)
	return slices.Compact(kinds)
}

// Select chooses the backend for p: the fastest that every hop of every rank can run, by the measured rates, else by
// the order of the architecture. Backends that need no remedy, or a cheap one, come before the others. The error is a
// *NoBackendError, or names the faults of p itself.
func Select(p Params) (*Choice, error) { return choose(p, rateTable()) }

func choose(p Params, table []rate) (*Choice, error) {
	p, err := p.checked()
	if err != nil {
		return nil, err
	}
	c := &Choice{Params: p, Hops: hopsOf(p)}
	verdicts := make(map[Backend]verdict, len(Backends))
	for _, b := range Backends {
		verdicts[b] = evaluate(b, p, c.Hops)
	}
	m := measuredFor(p, table)
	order := orderOf(p.Arch)
	order.backends = m.sort(order.backends)
	for _, b := range order.backends {
		if verdicts[b].ok {
			c.Able = append(c.Able, b)
		}
	}
	if p.Want != Auto && verdicts[p.Want].ok && !slices.Contains(c.Able, p.Want) {
		c.Able = append(c.Able, p.Want) // the reference on a GPU runs only if named
	}
	c.Backend, c.Reason = pick(p, order, m, verdicts)
	for _, b := range Backends {
		if b != c.Backend {
			c.Rejected = append(c.Rejected, verdicts[b].rejections...)
		}
	}
	for _, b := range Backends {
		if p.Want == Auto && verdicts[b].ok && !slices.Contains(c.Able, b) {
			c.Named = append(c.Named, b)
		}
	}
	if c.Backend == Auto {
		return nil, &NoBackendError{Want: p.Want, Params: p, Rejected: c.Rejected, Named: c.Named}
	}
	c.Remedies = verdicts[c.Backend].applied
	return c, nil
}

// pick returns the backend asked for if it can run, or the best able one; Auto if there is none.
func pick(p Params, order order, m measured, verdicts map[Backend]verdict) (Backend, string) {
	if p.Want != Auto {
		if !verdicts[p.Want].ok {
			return Auto, ""
		}
		return p.Want, "asked for" + verdicts[p.Want].remedied()
	}
	for _, tier := range [][]Backend{{Flash, Fused}, {Reference}} {
		for _, plain := range []bool{true, false} {
			for _, b := range order.backends {
				v := verdicts[b]
				if v.ok && slices.Contains(tier, b) && order.plain(v) == plain {
					return b, reason(b, p, order, m, verdicts)
				}
			}
		}
	}
	return Auto, ""
}

// reason explains the choice of b: its place in the order, the rejections of backends before it, and the rates that
// were compared.
func reason(b Backend, p Params, order order, m measured, verdicts map[Backend]verdict) string {
	var before []string
	for _, o := range order.backends {
		if o == b {
			break
		}
		v := verdicts[o]
		if v.ok {
			before = append(before, fmt.Sprintf("%s needs %s", o, v.cures()))
		} else {
			before = append(before, fmt.Sprintf("%s cannot run this (%s)", o, strings.Join(v.blocked, ", ")))
		}
	}
	place, why := "first", before
	if rates := m.comparison(b, order.backends); rates != "" {
		place, why = "fastest", append(why, rates)
	}
	if len(before) > 0 {
		place = "next"
	}
	s := fmt.Sprintf("%s on %s%s", place, archName(p.Arch), verdicts[b].remedied())
	if len(why) > 0 {
		s += ": " + strings.Join(why, "; ")
	}
	return s
}

func archName(arch int) string {
	if arch == 0 {
		return "a CPU"
	}
	return fmt.Sprintf("sm%d", arch)
}

// maxChoices bounds the choices that a Selector remembers. A run has a handful: its layer shapes, with and without
// training.
const maxChoices = 256

// Selector remembers choices by Params. Its zero value is ready, and it is safe for concurrent use.
type Selector struct {
	mu    sync.Mutex
	known map[Params]outcome
}

type outcome struct {
	choice *Choice
	err    error
}

// Select does what the package's Select does, once for each p. The choice is shared: read only.
func (s *Selector) Select(p Params) (*Choice, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o, ok := s.known[p]; ok {
		return o.choice, o.err
	}
	if s.known == nil || len(s.known) == maxChoices {
		s.known = map[Params]outcome{}
	}
	choice, err := Select(p)
	s.known[p] = outcome{choice, err}
	return choice, err
}

// An order ranks the backends of a range of architectures, fastest first. It decides unless the table of rates
// compares them.
type order struct {
	since    int // the first architecture, as in Params.Arch; the range ends at the next order
	backends []Backend
	// cheap lists rules with a remedy that was measured to leave the backend faster than the next one. A backend with
	// another remedy ranks after backends without, unless the remedy costs only an affordable part of the memory.
	cheap []string
}

// orders lists the preferences. On sm80, sm86 and sm89 cuDNN is no faster than flash. On Hopper our kernels are faster
// than cuDNN 9.19: 561 and 577 TFLOP/s forward and backward at 16K and 32K tokens of an H100, cuDNN 537 and 555; of
// packed documents on H200 441/304 forward/backward at 8K tokens a GPU and 552/416 at 32K, cuDNN 403/295 and 546/406.
// On later GPUs flash runs kernels of sm80, and cuDNN is faster (593 TFLOP/s forward on H200, FlashAttention-2 350).
// On a GPU the reference runs only if named: it is slow, and as an answer to auto it would hide that nothing else can
// run.
var orders = []order{
	{0, []Backend{Flash, Reference}, nil},
	{1, []Backend{Flash, Fused}, []string{"fused-one-rectangle"}},
	{91, []Backend{Fused, Flash}, []string{"fused-one-rectangle"}},
}

func orderOf(arch int) (o order) {
	for _, row := range orders {
		if row.since <= arch {
			o = row
		}
	}
	return o
}

// affordable is the share of a device's memory up to which a workspace of the square of the length leaves a backend
// its rank. Measured on H200 at 16K tokens (an eighth of the memory), deterministic fused attention is 1.2 to 2.2
// times as fast as flash.
const affordable = 1. / 8

// plain reports whether a backend runs without a remedy, or with cheap ones.
func (o *order) plain(v verdict) bool {
	for _, a := range v.applied {
		if !slices.Contains(o.cheap, a.Rule) && !a.affordable() {
			return false
		}
	}
	return true
}

// affordable reports whether the remedy costs memory alone, and a small share of the device's.
func (a *Applied) affordable() bool {
	if a.Kind != GrantWorkspace || len(a.Calls) == 0 {
		return false
	}
	for i := range a.Calls {
		if c := &a.Calls[i]; dpWorkspace(c) > affordable*float64(c.Memory) {
			return false
		}
	}
	return true
}
