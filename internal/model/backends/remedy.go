package backends

import (
	"fmt"
	"slices"
	"strings"
)

// RemedyKind is a way to make a backend run a call that a rule rejects.
type RemedyKind uint8

// The remedies.
const (
	SplitCall      RemedyKind = iota // several calls, merged by their LSE
	ZeroWorkspace                    // the library's workspace cleared before each backward call
	GrantWorkspace                   // a workspace of the square of the length, where memory has room
)

func (k RemedyKind) String() string {
	return [...]string{"split-call", "zero-workspace", "grant-workspace"}[k]
}

// MarshalText returns the name, which the workers of a run get.
func (k RemedyKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads the name.
func (k *RemedyKind) UnmarshalText(text []byte) error {
	for x := SplitCall; x <= GrantWorkspace; x++ {
		if x.String() == string(text) {
			*k = x
			return nil
		}
	}
	return fmt.Errorf("no remedy %q", text)
}

// Remedy makes a backend run a call that a rule rejects.
type Remedy struct {
	Kind  RemedyKind
	Text  string                        // a sentence for the user
	Cost  string                        // in memory and time
	apply func(c Call) (instead []Call) // nil if the remedy does not fit
}

// The remedies that rules name.
var (
	splitCall = &Remedy{SplitCall, "run the hop as several calls and merge them by their LSE",
		"a launch and a merge of the output for each call more", Call.cut}
	zeroWorkspace = &Remedy{ZeroWorkspace, "clear the workspace before each backward call",
		"one write of the workspace a backward call",
		func(c Call) []Call { c.ZeroedWorkspace = true; return []Call{c} }}
	grantWorkspace = &Remedy{GrantWorkspace,
		"give the deterministic backward pass its workspace of the square of the length",
		"2 bytes of device memory for each query, key and head of a call", Call.grantWorkspace}
)

// grantWorkspace fits if the device has that much memory (0: not known).
func (c Call) grantWorkspace() []Call {
	if c.Memory > 0 && dpWorkspace(&c) > float64(c.Memory) {
		return nil
	}
	c.GrantedWorkspace = true
	return []Call{c}
}

// A verdict is the result of the rules for one backend.
type verdict struct {
	ok      bool
	spoke   []Rejection // every rule, before and after remedies
	applied []Applied   // the remedies that make it run
	blocked []string    // rules without a cure
}

func (v verdict) cures() string {
	var s []string
	for _, a := range v.applied {
		if !slices.Contains(s, a.Kind.String()) {
			s = append(s, a.Kind.String())
		}
	}
	return strings.Join(s, ", ")
}

func (v verdict) remedied() string {
	if len(v.applied) == 0 {
		return ""
	}
	return ", with " + v.cures()
}

// judge asks every rule of b about every call, applies remedies, and asks again.
func judge(b Backend, p Params, hops []Call) verdict {
	j := judgement{backend: b, seen: map[[2]string]bool{}}
	j.ok = true
	for i := range hops {
		j.settle(hops[i])
	}
	if !j.ok {
		j.applied = nil
	}
	return j.verdict
}

type judgement struct {
	verdict
	backend Backend
	seen    map[[2]string]bool
}

// against returns all rules that reject c.
func against(b Backend, c *Call) []*Rule {
	var out []*Rule
	for i := range rules {
		if r := &rules[i]; r.Backend == b && r.speaks(c) {
			out = append(out, r)
		}
	}
	return out
}

// note keeps a rule that rejects c, once for each hop.
func (j *judgement) note(r *Rule, c *Call) {
	n := Rejection{Backend: j.backend, Rule: r.ID, Reason: r.Reason, Fix: r.Fix, Remedy: r.Remedy}
	if r.PerHop {
		n.Hop, n.Example = c.Hop, c.String()
	}
	if key := j.key(r, c); !j.seen[key] {
		j.seen[key] = true
		j.spoke = append(j.spoke, n)
	}
}

// maxSteps bounds the remedies of one call and its parts.
const maxSteps = 64

// key identifies a rejection: by its rule, and by the hop if it matters.
func (j *judgement) key(r *Rule, c *Call) [2]string {
	if r.PerHop {
		return [2]string{r.ID, c.Hop}
	}
	return [2]string{r.ID, ""}
}

// settle applies remedies to one call: the first rule that has one is obeyed, and the resulting calls are judged
// again. It notes the rules that reject the call itself, and rules that no remedy is left for.
func (j *judgement) settle(c Call) {
	for _, r := range against(j.backend, &c) {
		j.note(r, &c)
	}
	work := []Call{c}
	for steps := 0; len(work) > 0; steps++ {
		at := work[0]
		bad := against(j.backend, &at)
		if len(bad) == 0 {
			work = work[1:]
			continue
		}
		rule, calls := cure(bad, at)
		if calls == nil || steps == maxSteps {
			j.block(bad, &at)
			return
		}
		j.apply(rule, &c, calls)
		work = append(calls, work[1:]...)
	}
}

// cure returns the first rule of bad with a remedy that fits the call, and the calls that replace it.
func cure(bad []*Rule, c Call) (*Rule, []Call) {
	for _, r := range bad {
		if r.Remedy == nil {
			continue
		}
		if calls := r.Remedy.apply(c); calls != nil {
			return r, calls
		}
	}
	return nil, nil
}

// block records that no remedy helps c, the call itself or a part of it. It notes a rule that only rejects the result
// of a remedy if no noted rule says why: every rule that is named as blocking is among the rejections.
func (j *judgement) block(bad []*Rule, c *Call) {
	j.ok = false
	known := slices.ContainsFunc(bad, func(r *Rule) bool { return j.seen[j.key(r, c)] })
	for _, r := range bad {
		if !known {
			j.note(r, c)
		}
		if j.seen[j.key(r, c)] && !slices.Contains(j.blocked, r.ID) {
			j.blocked = append(j.blocked, r.ID)
		}
	}
}

// apply records a remedy once for each rule and hop.
func (j *judgement) apply(r *Rule, c *Call, calls []Call) {
	a := Applied{Remedy: r.Remedy, Rule: r.ID, Calls: slices.Clone(calls)}
	if r.PerHop {
		a.Hop = c.Hop
	}
	if len(calls) > 1 {
		a.More = fmt.Sprintf(" (%d calls)", len(calls))
	}
	for _, have := range j.applied {
		if have.Rule == a.Rule && have.Hop == a.Hop {
			return
		}
	}
	j.applied = append(j.applied, a)
}
