package backends

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/cuda/dnn"
	"github.com/cprun/cprun/partition"
)

// RemedyKind is a way to make a backend run a rejected call.
type RemedyKind string

// The remedies.
const (
	SplitCall      RemedyKind = "split-call"      // several calls, merged by their LSE
	ZeroWorkspace  RemedyKind = "zero-workspace"  // the library's workspace cleared before each backward call
	GrantWorkspace RemedyKind = "grant-workspace" // a workspace of the square of the length, if memory allows
)

// Remedy makes a backend run a rejected call.
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

// grantWorkspace fits if the device has that much memory (0: unknown).
func (c Call) grantWorkspace() []Call {
	if c.Memory > 0 && dpWorkspace(&c) > float64(c.Memory) {
		return nil
	}
	c.GrantedWorkspace = true
	return []Call{c}
}

// A verdict is the result of the rules for one backend.
type verdict struct {
	ok         bool
	rejections []Rejection // of every rule, before and after remedies
	applied    []Applied   // the remedies that make it run
	blocked    []string    // ids of rules without a remedy
}

func (v verdict) cures() string {
	var s []string
	for _, a := range v.applied {
		if !slices.Contains(s, string(a.Kind)) {
			s = append(s, string(a.Kind))
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

// evaluate applies every rule of b to every call, applies remedies, and repeats.
func evaluate(b Backend, p Params, hops []Call) verdict {
	j := evaluation{backend: b, seen: map[[2]string]bool{}}
	j.ok = true
	for i := range hops {
		j.applyRemedies(hops[i])
	}
	if !j.ok {
		j.applied = nil
	}
	return j.verdict
}

type evaluation struct {
	verdict
	backend Backend
	seen    map[[2]string]bool
}

func rejecting(b Backend, c *Call) []*Rule {
	var out []*Rule
	for i := range rules {
		if r := &rules[i]; r.Backend == b && r.applies(c) {
			out = append(out, r)
		}
	}
	return out
}

// note records a rule that rejects c, once for each hop.
func (j *evaluation) note(r *Rule, c *Call) {
	n := Rejection{Backend: j.backend, Rule: r.ID, Reason: r.Reason, Fix: r.Fix, Remedy: r.Remedy}
	if r.PerHop {
		n.Hop, n.Example = c.Hop, c.String()
	}
	if key := j.key(r, c); !j.seen[key] {
		j.seen[key] = true
		j.rejections = append(j.rejections, n)
	}
}

const maxSteps = 64

// key identifies a rejection: the rule, and the hop if it matters.
func (j *evaluation) key(r *Rule, c *Call) [2]string {
	if r.PerHop {
		return [2]string{r.ID, c.Hop}
	}
	return [2]string{r.ID, ""}
}

// applyRemedies applies remedies to one call: the remedy of the first rule that has one, until no rule rejects the
// resulting calls. It records the rules that reject the call itself, and rules without a remaining remedy.
func (j *evaluation) applyRemedies(c Call) {
	for _, r := range rejecting(j.backend, &c) {
		j.note(r, &c)
	}
	work := []Call{c}
	for steps := 0; len(work) > 0; steps++ {
		at := work[0]
		bad := rejecting(j.backend, &at)
		if len(bad) == 0 {
			work = work[1:]
			continue
		}
		rule, calls := firstRemedy(bad, at)
		if calls == nil || steps == maxSteps {
			j.block(bad, &at)
			return
		}
		j.apply(rule, &c, calls)
		work = append(calls, work[1:]...)
	}
}

// firstRemedy returns the first rule of bad with a fitting remedy, and the calls that replace c.
func firstRemedy(bad []*Rule, c Call) (*Rule, []Call) {
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

// block records that no remedy helps c, the call itself or a part of it. If no recorded rule explains this, it records
// the rule that rejects the result of a remedy.
func (j *evaluation) block(bad []*Rule, c *Call) {
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
func (j *evaluation) apply(r *Rule, c *Call, calls []Call) {
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

// cut splits a call as the cuDNN kernel does; nil if it does not. Rectangles run one by one. The parts share no rows.
func (c Call) cut() (parts []Call) {
	if c.Documents {
		return nil
	}
	if c.Rects > 1 {
		c.Rects = 1
		return []Call{c}
	}
	lo, hi := c.band()
	pieces := dnn.Cut(nil, partition.Tile{Q: partition.Range{Hi: c.SeqQ}, K: partition.Range{Hi: c.SeqKV},
		Band: partition.Band{Lo: lo, Hi: hi}})
	for _, p := range pieces {
		part := c
		part.QAt, part.KAt = c.QAt+p.Q.Lo, c.KAt+p.K.Lo
		part.SeqQ, part.SeqKV = p.Q.Len(), p.K.Len()
		part.setMask(lo-p.K.Lo+p.Q.Lo, hi-p.K.Lo+p.Q.Lo)
		parts = append(parts, part)
	}
	if len(parts) == 1 {
		return nil
	}
	return parts
}

// band returns the bounds of j-i, relative to the call's first query and key.
func (c *Call) band() (lo, hi int) {
	shift := 0
	if c.Mask == BottomRightMask {
		shift = c.SeqKV - c.SeqQ
	}
	lo, hi = -(c.SeqQ - 1), c.SeqKV-1
	if c.Left >= 0 {
		lo = shift - c.Left
	}
	if c.Right >= 0 {
		hi = shift + c.Right
	}
	return lo, hi
}

// Workspace returns the largest device memory of the chosen backend beside its inputs and outputs, over all hops and
// both passes of one layer. Our kernels need none: they accumulate in the caller's buffers.
func (c *Choice) Workspace() int64 {
	if c.Backend != Fused {
		return 0
	}
	most := 0.0 // a float64, so that huge lengths do not overflow
	for i := range c.Hops {
		most = max(most, c.Hops[i].fusedWorkspace())
	}
	return int64(most)
}

// fusedWorkspace returns the workspace of cudnn-frontend's backward pass, as kernels/gpu reserves it: dQ in float32,
// the row sums of dO*O, dK and dV of every query head for documents with grouped heads, and for the old deterministic
// algorithm of Hopper the matrix dP in blocks of up to 128.
func (c *Call) fusedWorkspace() float64 {
	if !c.Training {
		return 0
	}
	rowsQ := float64(c.Batch) * float64(c.Heads) * float64(c.SeqQ)
	rowsK := float64(c.Batch) * float64(c.Heads) * float64(c.SeqKV)
	n := 4*rowsQ*float64(c.HeadDim) + 4*rowsQ
	if c.Deterministic && KeepsMatrix(c.Arch, c.CUDNN) {
		n += dpBytes(c, 128)
	}
	if c.Documents && c.KVHeads != c.Heads {
		n += 4 * rowsK * float64(c.HeadDim+c.HeadDimV)
	}
	return n
}
