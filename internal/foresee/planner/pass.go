package planner

import (
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// A Topology maps the ranks of a context group to hosts and cores.
type Topology struct {
	PerHost int // consecutive ranks of a host; 0: all are on one
	// Shared says that the ranks of a host share its cores, and costs hold while all compute. A rank with less work
	// leaves its cores to the others, so that all take the average time for calls. Cores also carry messages, and
	// compute nothing meanwhile.
	Shared bool
	// Cores is the number of cores of a host; 0: not known. If every core gets the same number of ranks, package launch
	// pins each rank to one, and a rank shares only with the ranks of its core.
	Cores int
	// Gates says that calls of flash begin before the rows of the host's ranks arrive; see attention.Waiter.
	Gates bool
}

// gated reports whether calls of a backend wait for rows by themselves. A transfer between hosts has no gates.
func (p Topology) gated(backend string, t tensor.DType, ranks int) bool {
	return p.Gates && backend == backends.Flash.String() && t != attention.AccumulatorType(t) && p.edge(ranks) == 0
}

func (p Topology) sharers(rank int) int {
	host, n := p.host(rank), p.PerHost
	if p.Cores < 2 || n < p.Cores || n%p.Cores != 0 {
		return host
	}
	return host*p.Cores + rank%n*p.Cores/n
}

func (p Topology) host(rank int) int {
	if p.PerHost <= 0 {
		return 0
	}
	return rank / p.PerHost
}

// ExactRanks limits the ranks that Passes follows one by one.
const ExactRanks = 64

// A Result is the times of one pass.
type Result struct {
	Seconds float64 // of the slowest rank
	Ranks   []Rank  // in order: all, or of many a sample, each as if its peers began every exchange when it did
}

// Rank is the work of one rank in a pass, in seconds.
type Rank struct {
	Compute float64 // of kernel calls
	Copies  float64 // of packing, and of folds of gradients
	Host    float64 // that the host takes longer to queue the pass than the device to run it
	Exposed float64 // in which it waits for transfers, or its cores carry them
	End     float64 // from the pass's begin
	Calls   int     // that the host queues
}

// Passes simulates the forward and the backward pass of one attention on the ranks of a context group. Each rank
// queues the requests of the real loop of package ring.
//
// A message goes when both its ends have begun, and each direction of a link carries one at a time, in the
// order in which its rank has them. A message with a late peer holds up no other. A rank has two links: to
// the ranks of its host, and to other hosts. Every time here is a maximum of sums of costs, so a higher cost
// never makes a pass faster.
func Passes(algorithm string, s ring.Spec, a Attention, on Topology, c Costs) (forward, backward Result, err error) {
	var ranks []int // nil: all
	if s.Size > ExactRanks {
		ranks = on.sample(s.Size)
	}
	g, err := newGroup(algorithm, s, partition.NewIndex(s.Shape), ranks)
	if err != nil {
		return forward, backward, err
	}
	g.gated = on.gated(a.Backend, a.DType, s.Size)
	p := newPrices(a, on, c)
	for _, pass := range []struct {
		to       *Result
		backward bool
	}{{&forward, false}, {&backward, true}} {
		programs, err := g.programs(a, pass.backward)
		if err != nil {
			return forward, backward, err
		}
		if *pass.to, err = p.pass(programs, g.sampled); err != nil {
			return forward, backward, err
		}
	}
	return forward, backward, nil
}

// A group is the schedules of the ranks of a context group that are followed.
type group struct {
	schedules []*ring.Schedule
	rows      []int // of each
	sampled   bool
	gated     bool // calls wait for rows by themselves
}

func newGroup(algorithm string, s ring.Spec, index *partition.Index, ranks []int) (*group, error) {
	p, err := ring.NewIndexedPlanner(algorithm, s, index)
	if err != nil {
		return nil, err
	}
	g := &group{sampled: ranks != nil}
	if ranks == nil {
		p.Prepare()
		ranks = make([]int, s.Size)
		for r := range ranks {
			ranks[r] = r
		}
	}
	for _, r := range ranks {
		g.schedules, g.rows = append(g.schedules, p.Schedule(r)), append(g.rows, index.Keys(r))
	}
	return g, nil
}

func (g *group) programs(a Attention, backward bool) ([]*program, error) {
	list := make([]*program, len(g.schedules))
	var all errgroup.Group
	all.SetLimit(runtime.GOMAXPROCS(0))
	for i, s := range g.schedules {
		all.Go(func() error {
			list[i] = &program{rank: s.Rank, gated: g.gated}
			return (&Recorder{program: list[i]}).Run(s, a, g.rows[i], backward)
		})
	}
	return list, all.Wait()
}

// pass times the programs of a group. It follows the ranks together, or if the group has only some of them, each alone:
// in steps that all ranks take together the slowest link sets the pace, and it is one of those at the edge of a host.
func (p *prices) pass(programs []*program, sampled bool) (Result, error) {
	for _, x := range programs {
		p.price(x)
	}
	if !sampled {
		if p.topology.Shared {
			p.topology.average(programs, func(s *step) bool { return s.kind == compute || s.kind == copies })
			p.topology.average(programs, func(s *step) bool { return s.kind == begin })
		}
		return simulate(programs)
	}
	all := Result{}
	for _, x := range programs {
		all.add(simulateAlone(x))
	}
	return all, nil
}

// average scales some steps so that their sums are equal on the ranks that share cores.
func (p Topology) average(programs []*program, is func(*step) bool) {
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

// samples counts the ranks that are followed besides the ranks at edges.
const samples = 4

// sample returns the ranks to follow: the first and the last, both sides of the first edge between hosts, and some
// between.
func (p Topology) sample(ranks int) (list []int) {
	for i := range samples {
		list = append(list, i*(ranks-1)/(samples-1))
	}
	if edge := p.edge(ranks); edge > 0 {
		list = append(list, edge-1, edge)
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// edge returns the first rank on another host than rank 0; 0: there is none.
func (p Topology) edge(ranks int) int {
	if p.PerHost > 0 && p.PerHost < ranks {
		return p.PerHost
	}
	return 0
}
