package planner

import (
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// Attention is what one attention over ranks computes, apart from its schedule.
type Attention struct {
	Backend       string       // of package attention/backends
	DType         tensor.DType // of q, k and v, and of what travels of them
	Deterministic bool
	Batch         int // samples that go through at once
	Heads         int // of q
	KVHeads       int // of k and v
	Dim, DimV     int // of a head of k, and of v
}

// Place is where the ranks of a context group stand.
type Place struct {
	First   int // the global rank of the group's rank 0; the others follow it
	PerHost int // ranks of a host, which stand in order; 0: all on one
	// Shared says that the ranks of a host share its cores, and costs are those of a time when all compute. One that
	// has less to do leaves the cores to the others, so each takes as long for its calls as all do on average. Cores
	// carry messages, too, and compute nothing meanwhile.
	Shared bool
	// Cores are those of a host, where it is known. Where each gets as many ranks as any other, package launch has each
	// rank keep to one: cores are left to those of the same core only.
	Cores int
}

// sharers is a number that ranks have in common which leave each other the cores.
func (p Place) sharers(rank int) int {
	host, n := p.host(rank), p.PerHost
	if p.Cores < 2 || n < p.Cores || n%p.Cores != 0 {
		return host
	}
	return host*p.Cores + (p.First+rank)%n*p.Cores/n
}

// host is the host of a rank of the group.
func (p Place) host(rank int) int {
	if p.PerHost <= 0 {
		return 0
	}
	return (p.First + rank) / p.PerHost
}

// Schedules answers for every rank of a context group. A ring.Planner does.
type Schedules interface {
	// Schedule returns the schedule of a rank.
	Schedule(rank int) *ring.Schedule
}

// List is schedules that are there, one a rank.
type List []*ring.Schedule

// Schedule returns that of a rank.
func (l List) Schedule(rank int) *ring.Schedule { return l[rank] }

// NewSchedules returns the schedules of all ranks as Pass asks for them: it makes each when it is asked for, and asks
// all pairs of ranks only where each rank is followed.
func NewSchedules(algorithm string, s ring.Spec) (Schedules, error) {
	if s.Size <= ExactRanks {
		return ring.NewPlanner(algorithm, s)
	}
	if _, err := ring.New(algorithm, s, 0); err != nil {
		return nil, err
	}
	return each{algorithm, s}, nil
}

// each makes one schedule at a time, as ring.New does.
type each struct {
	algorithm string
	spec      ring.Spec
}

func (e each) Schedule(rank int) *ring.Schedule {
	s, err := ring.New(e.algorithm, e.spec, rank)
	if err != nil {
		panic("planner: " + err.Error()) // NewSchedules has made one of it
	}
	return s
}

// ExactRanks is the most ranks of which Pass follows each one.
const ExactRanks = 64

// Result is what Pass finds.
type Result struct {
	Seconds float64 // of the slowest rank
	Ranks   []Rank  // of those that were followed, in order
	// Sampled says that there were too many ranks to follow each. Those of Ranks were, each as if its peers
	// began every exchange when it did.
	Sampled bool
	Spans   []Span // of the ranks, hop by hop; only where they were asked for
}

// Rank is what one rank does in a pass, in seconds.
type Rank struct {
	Rank    int
	Compute float64 // of kernel calls
	Copies  float64 // of packing, and of folds of gradients
	Host    float64 // that the host takes longer to queue the pass than the device to run it
	Exposed float64 // in which it waits for transfers, or its cores carry them
	End     float64 // from the pass's begin
	Calls   int     // that the host queues
}

// Span is one hop of a rank, or one trade of its heads.
type Span struct {
	Rank       int
	Hop        string  // its label
	Begin, End float64 // seconds from the pass's begin
	Exposed    float64 // of it, seconds in which the rank waits for transfers
	// For is the peer that the rank waited for in the end, as it had begun last; -1: for no one, or for bytes on
	// the link.
	For int
}

// Pass simulates one attention pass, forward or backward, of the ranks of a context group. Each rank queues what
// the loops of package ring do: the exchanges of a hop begin before its first call, further calls wait for
// theirs, the rest are waited for at the end of the hop; trades of heads come before and behind; with groups of heads,
// the first exchanges of the next group begin behind the first hop of the one before.
//
// A message goes when both its ends have begun, and each direction of a link carries one at a time, in the
// order in which its rank has them. A message whose peer is late holds up no other. A rank has two links: to
// the ranks of its host, and to other hosts. Every time here is a maximum of sums of costs, so a higher cost
// never makes a pass faster.
func Pass(s Schedules, ranks int, a Attention, backward bool, at Place, c Costs) (Result, error) {
	return newCompiler(a, backward, at, c).pass(s, ranks, false)
}

// Timeline does what Pass does, and keeps the Spans of its ranks.
func Timeline(s Schedules, ranks int, a Attention, backward bool, at Place, c Costs) (Result, error) {
	return newCompiler(a, backward, at, c).pass(s, ranks, true)
}

// pass follows all ranks together, or where these are too many some, each alone.
func (k *compiler) pass(s Schedules, ranks int, spans bool) (Result, error) {
	if ranks > ExactRanks {
		return k.sampled(s, k.at.sample(ranks), spans), nil
	}
	k.bare = false
	programs := make([]*program, ranks)
	for r := range programs {
		programs[r] = k.compile(s.Schedule(r))
	}
	if k.at.Shared {
		k.at.share(programs)
	}
	w := newWorld(programs, spans)
	for w.advance() {
	}
	return w.result()
}

// share has ranks that leave each other the cores take as long as they do on average: for calls, and for carrying messages.
func (p Place) share(programs []*program) {
	p.average(programs, func(s *step) bool { return s.kind == compute || s.kind == copies })
	p.average(programs, func(s *step) bool { return s.kind == carry })
}

// average makes the sums of some steps alike on ranks that leave each other the cores.
func (p Place) average(programs []*program, is func(*step) bool) {
	total, ranks := map[int]float64{}, map[int]float64{}
	own := make([]float64, len(programs))
	for r, x := range programs {
		for i := range x.steps {
			if s := &x.steps[i]; is(s) {
				own[r] += s.seconds
			}
		}
		total[p.sharers(r)] += own[r]
		ranks[p.sharers(r)]++
	}
	for r, x := range programs {
		if own[r] == 0 {
			continue
		}
		mean := total[p.sharers(r)] / ranks[p.sharers(r)]
		for i := range x.steps {
			if s := &x.steps[i]; is(s) {
				s.seconds *= mean / own[r]
			}
		}
	}
}

// sampled follows some ranks, each alone: in steps that all ranks take together the slowest link sets the
// pace, and it is one of those at the edge of a host.
func (k *compiler) sampled(s Schedules, follow []int, spans bool) (all Result) {
	all.Sampled, k.bare = true, !spans
	for _, r := range follow {
		w := lone{runner: runner{program: k.compile(s.Schedule(r)), times: Rank{Rank: r}}, spans: spans, ends: k.ends[:0]}
		w.run()
		k.ends, all.Spans = w.ends, append(all.Spans, w.all...)
		all.add(w.end())
	}
	return all
}

// samples is how many ranks are followed, apart from those at edges.
const samples = 4

// sample is the ranks that are followed: the first and the last, both sides of the first edge between hosts,
// and some between.
func (p Place) sample(ranks int) (list []int) {
	for i := range samples {
		list = append(list, i*(ranks-1)/(samples-1))
	}
	if edge := p.edge(ranks); edge > 0 {
		list = append(list, edge-1, edge)
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// edge is the first rank that stands on another host than rank 0; 0: there is none.
func (p Place) edge(ranks int) int {
	if p.PerHost <= 0 {
		return 0
	}
	if edge := p.PerHost - p.First%p.PerHost; edge < ranks {
		return edge
	}
	return 0
}

// worse is the larger of two times, or what is not known.
func worse(a, b float64) float64 {
	if math.IsNaN(a) || math.IsNaN(b) {
		return math.Inf(1)
	}
	return max(a, b)
}

// errStuck says that ranks wait for each other. No schedule of package ring does that.
func errStuck(rank int, hop string) error {
	return fmt.Errorf("planner: rank %d waits for ever in %q: the schedules of its peers do not have its messages", rank, hop)
}
