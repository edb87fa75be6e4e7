package backends

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Rejection is the rejection of a backend by a rule.
type Rejection struct {
	Backend Backend
	Rule    string // the rule's id
	Reason  string
	Fix     string
	// Hop names the rejected kernel call, such as "half keys"; "" for a rule about the whole run. Example is one such
	// call, with its rank, lengths and mask.
	Hop     string
	Example string
	Remedy  *Remedy // nil: none
}

// Applied is a remedy that the choice needs: the caller must apply it.
type Applied struct {
	*Remedy
	Rule string // the rule that requires it
	Hop  string // as in Rejection
	More string // addition to Text: " (3 calls)"
	// Calls replace the call, the first one of a hop of that name.
	Calls []Call
}

// Choice is the result of a selection. Callers share it and must not change it.
type Choice struct {
	Backend Backend
	Reason  string
	// Rejected lists every rule that rejects another backend, with a remedy or without; Remedies lists the remedies of
	// the chosen one.
	Rejected []Rejection
	Remedies []Applied
	// Able lists the backends that can run this, in order of preference. Named lists backends that can too, but that
	// auto does not take on this machine.
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
	Named    []Backend // able to run it, but only if named
}

// Error lists the rules that reject the named backend, or every backend, with their fixes.
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

// NamedOnly returns the reason why auto does not take an able backend, and the fix.
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

// Select returns the backend for p: the fastest one that can run every hop of every rank, by measured rates, else by
// the order of the architecture. Backends without a remedy, or with a cheap one, come first. The error is a
// *NoBackendError, or names the faults of p.
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

// pick returns the requested backend if it can run, or the best able one; Auto if there is none.
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

// reason explains the choice of b: its place in the order, the rejections of earlier backends, and the compared rates.
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

// maxChoices bounds the cache of a Selector. A run has a handful of choices: its layer shapes, with and without
// training.
const maxChoices = 256

// Selector caches choices by Params. Its zero value is ready, and it is safe for concurrent use.
type Selector struct {
	mu    sync.Mutex
	known map[Params]outcome
}

type outcome struct {
	choice *Choice
	err    error
}

// Select returns the choice for p, computed once. Callers share it and must not change it.
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

// An order ranks the backends of a range of architectures, fastest first. The table of rates has priority.
type order struct {
	since    int // the first architecture, as in Params.Arch; the range ends at the next order
	backends []Backend
	// cheap lists rules with a remedy after which the backend is still faster than the next one, as measured. With
	// another remedy a backend ranks after those without, unless the remedy needs only an affordable part of the
	// memory.
	cheap []string
}

// orders lists the preferences. On sm80, sm86 and sm89 cuDNN is no faster than flash. On Hopper our kernels are faster
// than cuDNN 9.19: 561 and 577 TFLOP/s forward and backward at 16K and 32K tokens of an H100, cuDNN 537 and 555; with
// packed documents on H200 441/304 forward/backward at 8K tokens a GPU and 552/416 at 32K, cuDNN 403/295 and 546/406.
// On later GPUs flash runs kernels of sm80, and cuDNN is faster (593 TFLOP/s forward on H200, FlashAttention-2 350). On
// a GPU the reference runs only if named, since it is slow.
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

// affordable is the largest share of a device's memory for a workspace of the square of the length that does not lower
// the backend's rank. Measured on H200 at 16K tokens (an eighth of the memory), deterministic fused attention is 1.2 to
// 2.2 times as fast as flash.
const affordable = 1. / 8

// plain reports whether a backend runs without a remedy, or with cheap ones.
func (o *order) plain(v verdict) bool {
	return !slices.ContainsFunc(v.applied, func(a Applied) bool {
		return !slices.Contains(o.cheap, a.Rule) && !a.affordable()
	})
}

// affordable reports whether the remedy costs memory alone, and a small share of the device's.
func (a *Applied) affordable() bool {
	return a.Kind == GrantWorkspace && len(a.Calls) > 0 && !slices.ContainsFunc(a.Calls, func(c Call) bool {
		return dpWorkspace(&c) > affordable*float64(c.Memory)
	})
}
