package backends

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/attention/qkv"
)

// RemedyKind is a way to make a backend run a call that it cannot run as it is.
type RemedyKind uint8

// The remedies.
const (
	NoRemedy       RemedyKind = iota
	PadHeadDims               // zeros behind the head dims; the result is sliced
	PadSequence               // rows behind the sequence; the mask hides them
	MakeContiguous            // q, k, v copied to dense tensors of their own
	SplitCall                 // several calls, merged by their LSE
	ZeroWorkspace             // the library's workspace cleared before each backward call
	GrantWorkspace            // a workspace of the square of the length, where memory has room
)

func (k RemedyKind) String() string {
	return [...]string{"none", "pad-head-dims", "pad-sequence", "make-contiguous", "split-call", "zero-workspace", "grant-workspace"}[k]
}

// MarshalText returns the name, which is how a remedy is told to the workers of a run.
func (k RemedyKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads the name.
func (k *RemedyKind) UnmarshalText(text []byte) error {
	for x := NoRemedy; x <= GrantWorkspace; x++ {
		if x.String() == string(text) {
			*k = x
			return nil
		}
	}
	return fmt.Errorf("no remedy %q", text)
}

// Remedy is what is done so that a backend takes tensors that a rule refuses.
type Remedy struct {
	Kind     RemedyKind
	Multiple int    // pads lengths or head dims to a multiple of it; 0 under PadHeadDims: pads the smaller head dim to the larger
	Built    bool   // this build can do it; a choice relies on no other remedy, unless Params.Unbuilt is set
	Text     string // what is done, as "pad the sequence to a multiple of 64"
	Cost     string // what that costs in memory and time
}

// The remedies that rules name.
var (
	padToLarger = Remedy{PadHeadDims, 0, false, "pad the smaller head dim with zeros to the larger and slice the result",
		"memory and matrix products of the larger head dim, and a copy of the padded tensors"}
	padTo8 = Remedy{PadHeadDims, 8, false, "pad the head dims with zeros to a multiple of 8 and slice the result",
		"memory and matrix products of the larger head dim, and a copy of q, k and v"}
	padTo16 = Remedy{PadHeadDims, 16, false, "pad the head dims with zeros to a multiple of 16 and slice the result",
		"memory and matrix products of the larger head dim, and a copy of q, k and v"}
	padSeq64 = Remedy{PadSequence, 64, false, "pad the sequence to a multiple of 64, with a mask that hides the padding",
		"up to 63 more rows a call, and a copy of q, k and v"}
	padSeq128 = Remedy{PadSequence, 128, false, "pad the sequence to a multiple of 128, with a mask that hides the padding",
		"up to 127 more rows a call, and a copy of q, k and v"}
	makeContiguous = Remedy{MakeContiguous, 0, false, "copy q, k and v to contiguous tensors of their own",
		"one read and one write of q, k and v before each pass"}
	splitCall = Remedy{SplitCall, 0, true, "run the hop as several calls and merge them by their LSE",
		"a launch and a merge of the output for each call more"}
	zeroWorkspace = Remedy{ZeroWorkspace, 0, true, "clear the workspace before each backward call",
		"one write of the workspace a backward call"}
	grantWorkspace = Remedy{GrantWorkspace, 0, true, "give the deterministic backward pass its workspace of the square of the length",
		"2 bytes of device memory for each query, key and head of a call"}
)

// maxCalls bounds what one call may be split into.
const maxCalls = 8

// apply is the calls that stand for c under r; nil where the remedy does not fit, or is not built.
func (r Remedy) apply(c Call) []Call {
	bit := 1 << r.Kind
	if r.Kind == NoRemedy || c.done&bit != 0 || !r.Built && !c.Unbuilt {
		return nil
	}
	c.done |= bit
	switch r.Kind {
	case PadHeadDims:
		return c.padHeadDims(r.Multiple)
	case PadSequence:
		return c.padSequence(r.Multiple)
	case MakeContiguous:
		c.copied()
		return []Call{c}
	case SplitCall:
		if !c.Unbuilt {
			return c.cut()
		}
		return c.split()
	case ZeroWorkspace:
		c.ZeroedWorkspace = true
		return []Call{c}
	case GrantWorkspace:
		return c.grantWorkspace()
	}
	return nil
}

// grantWorkspace fits from cuDNN 9.0.0 on, before which the pass is not deterministic whatever it
// is given, and where the device has that much memory (0: not known).
func (c Call) grantWorkspace() []Call {
	if c.CUDNN < V(9, 0, 0) || c.Memory > 0 && dpWorkspace(&c) > float64(c.Memory) {
		return nil
	}
	c.GrantedWorkspace = true
	return []Call{c}
}

func roundUp(n, m int) int { return (n + m - 1) / m * m }

// padHeadDims is right because zeros add nothing to a dot product, and columns of zeros in V
// become columns of the result that are cut off. The scale stays that of the true head dim.
func (c Call) padHeadDims(multiple int) []Call {
	if multiple == 0 {
		c.HeadDim = max(c.HeadDim, c.HeadDimV)
		c.HeadDimV = c.HeadDim
	} else {
		c.HeadDim, c.HeadDimV = roundUp(c.HeadDim, multiple), roundUp(c.HeadDimV, multiple)
		c.done &^= 1 << PadHeadDims // dims may still differ afterwards; the loop is bounded
	}
	c.copied()
	return []Call{c}
}

// copied says that q, k and v are dense tensors of their own.
func (c *Call) copied() { c.Contiguous, c.Packing, c.MixedFormats = true, qkv.Separate, false }

// padSequence adds rows behind q, k and v. Padded queries are cut off. Padded keys are behind
// every true query under a causal mask of a square; elsewhere a padding mask must hide them.
func (c Call) padSequence(multiple int) []Call {
	if c.Documents {
		return nil // lengths are the documents', and there is nothing between them
	}
	q, k := roundUp(c.SeqQ, multiple), roundUp(c.SeqKV, multiple)
	grown := k > c.SeqKV
	switch c.Mask {
	case FullMask:
		c.PaddedKeys = grown
	case CausalMask:
		c.PaddedKeys = grown && c.SeqQ > c.SeqKV
	case BottomRightMask: // the diagonal stays where it is if both grow alike
		if q-c.SeqQ != k-c.SeqKV {
			return nil
		}
	case BandMask:
		c.PaddedKeys = grown
	}
	c.SeqQ, c.SeqKV = q, k
	c.copied()
	return []Call{c}
}

// verdict is what the rules say about one backend.
type verdict struct {
	ok      bool
	spoke   []Rejection // every rule, before and after remedies
	applied []Applied   // what makes it run, if it does
	blocked []string    // rules without a cure
}

func (v verdict) blocking() string { return strings.Join(v.blocked, ", ") }

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

// judge asks every rule of b about every call, cures what can be cured, and asks again.
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

// against is the rules that speak against c, all of them.
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

// key is what rejections are told apart by: the rule, and the hop if it matters.
func (j *judgement) key(r *Rule, c *Call) [2]string {
	if r.PerHop {
		return [2]string{r.ID, c.Hop}
	}
	return [2]string{r.ID, ""}
}

// settle cures one call as far as it goes: the first rule that has a remedy is obeyed, and
// what the call became is judged again. Of the rules that speak, those against the call itself
// are noted, and those that no remedy is left for.
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

// cure is the first rule of bad whose remedy fits the call, and what the call becomes.
func cure(bad []*Rule, c Call) (*Rule, []Call) {
	for _, r := range bad {
		if calls := r.Remedy.apply(c); calls != nil {
			return r, calls
		}
	}
	return nil, nil
}

// block records that nothing helps c, the call itself or a part of it. Rules that speak only
// against what a remedy made of it are told where no other rule says why, and nowhere else:
// every rule that is named as blocking is among the rejections.
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
		a.Text += fmt.Sprintf(" (%d calls)", len(calls))
	}
	for _, have := range j.applied {
		if have.Rule == a.Rule && have.Hop == a.Hop {
			return
		}
	}
	j.applied = append(j.applied, a)
}
