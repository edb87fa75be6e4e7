package plan

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/model/machine"
)

// Bounds of the search for advice: the factor of a shorter sequence, and the ranks that share it.
const (
	maxFactor = 1 << 20
	maxSpread = 512
)

// commonHost is a number of GPUs of a host. Advice of more ranks assumes that as many share the host memory.
const commonHost = 8

type measure func(cfg *config.Config, ranks int, machine machine.Machine, d *demand) (Memory, error)

type smaller struct {
	advice string
	cfg    config.Config
	ranks  int
	demand *demand
}

// An adviser measures changes of a run that does not fit.
type adviser struct {
	of      measure
	on      machine.Machine
	perHost int // ranks
}

// lacks returns the bytes that a rank of a changed run lacks.
func (a *adviser) lacks(s *smaller) int64 {
	at := a.on
	at.Hosts = max(at.Hosts, (s.ranks+a.perHost-1)/a.perHost) // more ranks come with more hosts
	less, err := a.of(&s.cfg, s.ranks, at, s.demand)
	if err != nil {
		return math.MaxInt64
	}
	return less.short(at, s.ranks)
}

// advised returns m with its largest item and the changes that make it fit, if it does not. It measures every change,
// and so omits settings that are already there or cannot help.
func (m Memory) advised(of measure, cfg *config.Config, ranks int, on machine.Machine, d *demand) Memory {
	if m.Fits || m.Device == 0 {
		return m
	}
	a := &adviser{of, on, max(commonHost, on.GPUs, on.PerHost(ranks))}
	now := smaller{cfg: *cfg, ranks: ranks, demand: d}
	together, enough, all := a.pull(&m, now)
	other, ok := now.adapters() // for a run that no key makes fit
	ok = ok && len(enough) == 0 && a.lacks(&other) == 0
	if enough = append(enough, a.spreads(now)...); len(enough) == 0 {
		if joint := a.joint(together, all); len(joint) > 0 {
			enough = []string{strings.Join(joint, " and ") + " together"}
		}
	}
	if ok {
		enough = append(enough, other.advice)
	}
	_, most := m.largest(on, ranks)
	m.advice = fmt.Sprintf("; the largest item is %s with %s", most.name, readable.Bytes(most.bytes))
	whole := most.name == "compute copy" || most.name == "frozen weights" ||
		most.name == "weights" && (m.Compute == 0 || cfg.Memory.Shard == "none")
	if whole && cfg.Memory.Shard != "parameters" {
		m.advice += ", whole on every rank"
	}
	if len(enough) > 0 {
		m.advice += "; to fit, use " + strings.Join(enough, ", or ")
	} else {
		m.advice += fmt.Sprintf("; no keys of memory, no shorter samples and no number of ranks up to %d make it fit: use a "+
			"smaller model, or devices with more memory", maxSpread)
	}
	return m
}

// pull returns the changes of keys that fit by themselves, all that help, and the run with all of them.
func (a *adviser) pull(m *Memory, now smaller) (together smaller, enough, all []string) {
	together = now
	for _, values := range levers {
		need := m.short(a.on, now.ranks)
		need -= need / 100
		var best smaller
		var pull lever
		for _, change := range values {
			s, ok := change(now)
			if n := a.lacks(&s); ok && n < need {
				best, need, pull = s, n, change
			}
		}
		if pull == nil || best.cfg.Memory.Offload != now.cfg.Memory.Offload && m.HostDevice == 0 {
			continue
		}
		if together, _ = pull(together); need == 0 {
			enough = append(enough, best.advice)
		}
		all = append(all, best.advice)
	}
	return together, enough, all
}

// joint returns changes that fit together: all of them, and if necessary a shorter sequence or other ranks; none: they
// do not.
func (a *adviser) joint(together smaller, all []string) []string {
	if len(all) == 0 || a.lacks(&together) == 0 {
		return all
	}
	if others := a.spreads(together); len(others) > 0 {
		return append(all, others[0])
	}
	return nil
}

// spreads returns the changes by a factor that fit.
func (a *adviser) spreads(s smaller) (list []string) {
	whole := s
	whole.cfg.Memory.Shard = "parameters"
	for _, change := range a.spread() {
		advice, factor := a.search(s, change)
		if s.ranks == 1 { // no key of one rank divides the state
			if other, least := a.search(whole, change); other != "" && (advice == "" || least < factor) {
				advice = other
			}
		}
		if advice != "" {
			list = append(list, advice)
		}
	}
	return list
}

type factored func(s smaller, factor int) (smaller, bool)

// spread lists the changes by a factor.
func (a *adviser) spread() []factored {
	if a.on.IsCPU() {
		return []factored{smaller.shorter, smaller.fewer} // ranks of a CPU share its memory
	}
	return []factored{smaller.shorter, smaller.spread}
}

// search returns the advice of the least factor that fits, and its logarithm; "": none does. It bisects, since a
// measurement of a thousand layers takes long.
func (a *adviser) search(s smaller, change factored) (advice string, factor int) {
	var list []smaller
	for f := 2; f <= maxFactor; f *= 2 {
		if less, ok := change(s, f); ok {
			list = append(list, less)
		}
	}
	for i := sort.Search(len(list), func(i int) bool { return a.lacks(&list[i]) == 0 }); i < len(list); i++ {
		var err error
		if list[i].demand, err = demandOf(&list[i].cfg, a.on, nil, nil); err == nil && a.lacks(&list[i]) == 0 {
			return list[i].advice, i
		}
	}
	return "", 0
}

// Shortage returns the fix for a run that does not get its memory, and its memory by kind. free is the unused memory of
// the device; with host the run lacks host memory instead.
func (m *Memory) Shortage(cfg *config.Config, ranks int, on machine.Machine, free int64, host bool) string {
	c, fix := *cfg, "end other processes on the device (nvidia-smi lists them), or set memory.reserve to their memory"
	c.Memory.Reserve = "0"
	if on.Memory = free + m.Context; host {
		fix, on.Memory, on.Locked = "raise the limit of locked memory (ulimit -l)", m.Device-m.Reserve, 1
	}
	if less, err := MemoryOf(&c, ranks, on); err == nil {
		fix += less.advice
	}
	var b strings.Builder
	m.table(&b)
	return fix + "\nmemory of the run by kind:\n" + b.String()
}

// largest returns the memory that the run exceeds, and its largest item.
func (m *Memory) largest(on machine.Machine, ranks int) (memory string, most item) {
	memory, items := "device memory", m.items()
	if device, host := m.excess(on, ranks); device <= 0 && host > 0 {
		memory, items = "host memory", m.hostItems()
	}
	return memory, slices.MaxFunc(items, func(a, b item) int { return cmp.Compare(a.bytes, b.bytes) })
}

// Free returns the bytes that a run leaves of the memory with least room; negative: it lacks them.
func (m *Memory) Free(on machine.Machine, ranks int) int64 {
	device, host := m.excess(on, ranks)
	if m.HostTotal == 0 {
		return -device
	}
	return -max(device, host)
}

// Bound returns the memory that a run exceeds, and its largest item.
func (m *Memory) Bound(on machine.Machine, ranks int) string {
	memory, most := m.largest(on, ranks)
	return fmt.Sprintf("%s: %s take %s of %s", memory, most.name, readable.Bytes(most.bytes),
		readable.Bytes(map[string]int64{"device memory": m.Device, "host memory": m.HostDevice}[memory]))
}

// A lever makes a run smaller in one way; false: it does not apply.
type lever func(s smaller) (smaller, bool)

// levers lists the changes of each key, the weakest first.
var levers = [][]lever{
	set("memory.shard", func(m *config.Memory) *string { return &m.Shard }, "gradients", "parameters"),
	set("memory.recompute", func(m *config.Memory) *string { return &m.Recompute }, "selective", "full"),
	{smaller.chunked}, {smaller.oneByOne}, {smaller.waiting},
	set("memory.offload", func(m *config.Memory) *string { return &m.Offload }, "off", "activations", "optimizer",
		"both"),
}

func set(key string, at func(*config.Memory) *string, values ...string) (list []lever) {
	for _, v := range values {
		list = append(list, func(s smaller) (smaller, bool) {
			s.advice, *at(&s.cfg.Memory) = key+" "+v, v
			return s, true
		})
	}
	return list
}

func (s smaller) chunked() (smaller, bool) {
	least := lossChunks[len(lossChunks)-1]
	ok := s.cfg.Memory.LossChunk > least
	s.advice, s.cfg.Memory.LossChunk = fmt.Sprintf("memory.loss_chunk %d", least), least
	return s, ok
}

func (s smaller) waiting() (smaller, bool) {
	s.advice, s.cfg.Checkpoint.Async = "checkpoint.async auto", new(false)
	return s, true
}

func (s smaller) oneByOne() (smaller, bool) {
	samples := sequences(&s.cfg)
	d := *s.demand
	d.buffers /= int64(samples)
	s.advice, s.cfg.Train.MicroBatchSize, s.demand = "train.micro_batch_size 1", 1, &d
	return s, samples > 1
}

// adapters returns the run with adapters in place of full fine-tuning.
func (s smaller) adapters() (smaller, bool) {
	ok := s.cfg.Model.Tuning.LoRA == nil
	if ok {
		s.cfg.Model.Tuning.LoRA = &hf.LoRA{R: 16, Alpha: 32}
		s.cfg.Model.RenameTargets()
		d := *s.demand
		d.kept, d.layouts = map[kept]model.Memory{}, map[int]*model.FlatLayout{}
		s.advice, s.demand = "lora.r 16 (adapters)", &d
	}
	return s, ok
}

func (s smaller) shorter(factor int) (smaller, bool) {
	s.cfg.Data.SeqLen /= factor
	s.advice, s.demand = fmt.Sprintf("data.seq_len of at most %d", s.cfg.Data.SeqLen), s.demand.less(factor)
	return s, s.cfg.Data.SeqLen >= 2*s.cfg.Parallel.Context
}

func (s smaller) spread(factor int) (smaller, bool) {
	s.ranks *= factor
	s.cfg.Parallel.Context *= factor
	s.advice, s.demand = fmt.Sprintf("at least %d ranks", s.ranks), s.demand.less(factor)
	if m := &s.cfg.Memory; s.ranks == factor { // there was nothing to shard over
		if m.Shard == "none" {
			m.Shard = "gradients"
		}
		s.advice += " with memory.shard " + m.Shard
	}
	return s, s.cfg.Parallel.Context <= min(maxSpread, s.cfg.Data.SeqLen/2)
}

// fewer returns the run on fewer ranks: each has a copy of some state.
func (s smaller) fewer(factor int) (smaller, bool) {
	ok := s.ranks%factor == 0 && s.cfg.Parallel.Context%factor == 0
	if ok {
		d := *s.demand
		d.tokens, d.buffers = d.tokens*factor, d.buffers*int64(factor)
		s.ranks, s.cfg.Parallel.Context, s.demand = s.ranks/factor, s.cfg.Parallel.Context/factor, &d
	}
	s.advice = fmt.Sprintf("--nproc %d", s.ranks)
	return s, ok
}

// less estimates the demand of factor times fewer tokens.
func (d *demand) less(factor int) *demand {
	part := func(n int) int { return (n + factor - 1) / factor }
	l := *d
	l.tokens, l.buffers, l.works = part(d.tokens), d.buffers/int64(factor), map[planner.Work]planner.Work{}
	for h, w := range d.works {
		w.Queries, w.Keys = part(w.Queries), part(w.Keys)
		l.works[h] = w
	}
	return &l
}

// measured returns the memory of a run by of, with advice by alike if it does not fit.
func measured(of, alike measure, cfg *config.Config, ranks int, machine machine.Machine, data *Data) (Memory, error) {
	d, err := demandOf(cfg, machine, data, nil)
	if err != nil {
		return Memory{}, err
	}
	m, err := of(cfg, ranks, machine, d)
	return m.advised(alike, cfg, ranks, machine, d), err
}

// MemoryOf returns the memory of a run of a resolved config on a machine.
func MemoryOf(cfg *config.Config, ranks int, machine machine.Machine) (Memory, error) {
	return measured(decidedOf, memoryOf, cfg, ranks, machine, nil)
}

// EvalMemoryOf returns the memory of an evaluation, without gradients and moments.
func EvalMemoryOf(cfg *config.Config, ranks int, machine machine.Machine) (Memory, error) {
	return measured(evalMemory, evalMemory, cfg, ranks, machine, nil)
}

func evalMemory(cfg *config.Config, ranks int, machine machine.Machine, d *demand) (Memory, error) {
	c := *cfg
	c.Memory.Offload, c.Checkpoint.Async = "off", new(false)
	m, err := memoryOf(&c, ranks, machine, d)
	m.Gradients, m.Optimizer, m.Activations, m.Layers = 0, 0, m.validation, Layers{}
	m.total(cfg, machine, ranks)
	return m, err
}
