package plan

import (
	"cmp"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/cost"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// lossChunks lists numbers of tokens with logits in memory at once on a GPU. More than the largest make no matrix
// product faster; fewer than the second cost some speed.
var lossChunks = []int{8192, 4096, 2048, 1024}

// goodChunks counts the chunks that are worth more of other measures.
const goodChunks = 2

// Fit decides memory.recompute, loss_chunk, shard and offload if a resolved config for a GPU leaves them auto: the
// fastest choice that fits the machine's memory, with a large chunk; if nothing fits, the choice that lacks least; if
// the memory is not known, selective recompute and sharded gradients. Then it decides checkpoint.async. It returns the
// memory that the run then takes, which may not fit: see Memory.Check. data is nil if it is not known.
func Fit(cfg *config.Config, ranks int, machine machine.Machine, data *Data) (Memory, error) {
	return measured(fit, memoryOf, cfg, ranks, machine, data)
}

func fit(cfg *config.Config, ranks int, machine machine.Machine, d *demand) (Memory, error) {
	chunks, good := []int{cfg.Memory.LossChunk}, 1
	if chunks[0] == 0 {
		tokens, err := mostTokens(cfg)
		if err != nil {
			return Memory{}, err
		}
		chunks = upTo(max(1, tokens*cfg.Train.MicroBatchSize))
		good = min(goodChunks, len(chunks))
	}
	s := newSearch(cfg, ranks, machine, d)
	list := choices(cfg.Memory, machine)
	err := s.over(list, chunks[:good])
	if err == nil && !s.memory.Fits && good < len(chunks) {
		err = s.over(list, chunks[good:])
	}
	cfg.Memory = s.best
	if cfg.Checkpoint.Async == nil && s.memory.Fits {
		cfg.Checkpoint.Async = new(s.memory.HostSnapshot == s.memory.snapshot)
	}
	if err != nil {
		return s.memory, err
	}
	return s.memory.twoAhead(cfg, ranks, machine, d)
}

// choices returns values of memory's keys with every auto replaced, the simplest first.
func choices(auto config.Memory, machine machine.Machine) (list []config.Memory) {
	shards := []string{"gradients", "parameters"}
	offloads := []string{"off", "activations", "optimizer", "both"}
	recomputes := []string{"none", "selective", "full"}
	if machine.Memory == 0 {
		shards, recomputes = shards[:1], recomputes[1:2]
	}
	if host, _ := machine.HostMemory(); host == 0 || machine.Memory == 0 {
		offloads = offloads[:1]
	}
	open := func(given string, all []string) []string {
		if given == "auto" {
			return all
		}
		return []string{given}
	}
	for _, offload := range open(auto.Offload, offloads) {
		for _, recompute := range open(auto.Recompute, recomputes) {
			for _, shard := range open(auto.Shard, shards) {
				c := auto
				c.Offload, c.Recompute, c.Shard = offload, recompute, shard
				list = append(list, c)
			}
		}
	}
	return list
}

// A search finds the fastest choice that fits. It times choices roughly, by published figures of the device, so that
// the order of choices is the same with and without a cost table.
type search struct {
	cfg       *config.Config
	ranks     int
	machine   machine.Machine
	demand    *demand
	rate      float64      // FLOP/s
	attention []layerTimes // by layer
	passes    map[dropped]*rehearsal

	best    config.Memory
	memory  Memory // of best
	seconds float64
}

// dropped names the rehearsals of choices that compute the same again.
type dropped struct {
	recompute string
	layers    int
}

const (
	reached  = 0.6   // share of the published peak that products, attention and links inside a host reach
	plainGPU = 1e14  // FLOP/s of an unknown device
	plainNet = 50e9  // bytes a second of an unknown link to other hosts
	plainBus = 450e9 // and inside a host
)

func newSearch(cfg *config.Config, ranks int, on machine.Machine, d *demand) *search {
	s := &search{cfg: cfg, ranks: ranks, machine: on, demand: d, rate: plainGPU, passes: map[dropped]*rehearsal{}}
	if peak := on.Peak(); peak > 0 {
		s.rate = reached * peak
	}
	for _, l := range cfg.Model.Layers() {
		m := l.Mixer // a recurrent one has no heads of attention
		pairs := model.VisiblePairs([]int{cfg.Data.SeqLen}, m.Window) * float64(sequences(cfg)) /
			float64(cfg.Parallel.Context)
		t := cost.AttentionFLOPs(pairs, m.Heads, m.Dim, m.DimV) / s.rate
		s.attention = append(s.attention, layerTimes{passTime{compute: t}, passTime{compute: 2.5 * t}})
	}
	return s
}

// over considers choices with these chunks. Among equals the first wins, so that nothing changes without a need.
func (s *search) over(list []config.Memory, chunks []int) error {
	cfg := *s.cfg
	for _, choice := range list {
		for _, chunk := range chunks {
			cfg.Memory = choice
			cfg.Memory.LossChunk = chunk
			m, err := memoryOf(&cfg, s.ranks, s.machine, s.demand)
			if err != nil {
				return err
			}
			t, err := s.extra(&cfg, &m)
			if err != nil {
				return err
			}
			better := m.Fits && t < s.seconds
			if !s.memory.Fits {
				better = m.Fits || s.memory.Total == 0 ||
					m.short(s.machine, s.ranks) <= s.memory.short(s.machine, s.ranks)
			}
			if better {
				s.best, s.memory, s.seconds = cfg.Memory, m, t
			}
			if m.Fits {
				if t == 0 {
					return nil
				}
				break // smaller chunks are slower
			}
		}
	}
	return nil
}

// extra returns the seconds that a choice adds to a step.
func (s *search) extra(cfg *config.Config, m *Memory) (float64, error) {
	plain := *cfg
	plain.Memory.Recompute = string(model.RecomputeNone)
	least, err := s.rehearsed(&plain, &Memory{})
	if err != nil {
		return 0, err
	}
	r, err := s.rehearsed(cfg, m)
	if err != nil {
		return 0, err
	}
	forward, backward := r.sums()
	ownForward, ownBackward := least.sums()
	t := forward + backward - ownForward - ownBackward
	micro := cfg.Train.GlobalBatchSize / (sequences(cfg) * cfg.Parallel.Data)
	t = float64(micro)*t + m.offloading(s.machine.HostRate(s.ranks), r, micro)
	if cfg.Memory.Shard == "parameters" {
		return t + s.gathering(cfg, m, r, micro), nil
	}
	if cfg.Memory.Shard != "none" { // gathers once a step
		t += max(0, s.gather(1)*float64(r.all)-r.begin-forward)
	}
	return t, nil
}

// gathering returns the seconds that gathers of sharded parameters add to a step of micro passes, beside reductions.
func (s *search) gathering(cfg *config.Config, m *Memory, r *rehearsal, micro int) float64 {
	dtype := backend.DType(cfg)
	gather := s.gather(m.Copies) / float64(dtype.Size()) // seconds of a byte
	reduce := s.gather(1) * float64(wireBytes(cfg)) / float64(dtype.Size())
	with := func(gather float64) float64 {
		return r.waits(micro, m.Slots, func(b int) float64 { return gather * float64(weights(r.flat, b, dtype)) },
			func(b int) float64 { return reduce * float64(r.flat.Buckets[b].Size()) })
	}
	all := 0.0
	for b := range r.flat.Buckets {
		all += 2 * float64(micro) * gather * float64(weights(r.flat, b, dtype))
	}
	return max(contention*all, with(gather)-with(0))
}

// decidedOf returns the memory of a run without auto in its keys.
func decidedOf(cfg *config.Config, ranks int, on machine.Machine, d *demand) (Memory, error) {
	m, err := memoryOf(cfg, ranks, on, d)
	if err != nil {
		return m, err
	}
	return m.twoAhead(cfg, ranks, on, d)
}

// twoAhead returns m, or the memory of the run with another slot for sharded weights, if that fits and makes a step
// shorter by more than a hundredth.
func (m Memory) twoAhead(cfg *config.Config, ranks int, on machine.Machine, d *demand) (Memory, error) {
	if cfg.Memory.Shard != "parameters" || !m.Fits || on.IsCPU() {
		return m, nil
	}
	more, err := memoryWith(cfg, ranks, m.Copies, m.Slots+1, on, d)
	if err != nil || !more.Fits || more.Layers != m.Layers {
		return m, err
	}
	s := newSearch(cfg, ranks, on, d)
	r, err := s.rehearsed(cfg, &m)
	if err != nil {
		return m, err
	}
	micro := cfg.Train.GlobalBatchSize / (sequences(cfg) * cfg.Parallel.Data)
	forward, backward := r.sums()
	two, three := s.gathering(cfg, &m, r, micro), s.gathering(cfg, &more, r, micro)
	if step := float64(micro)*(r.begin+forward+backward+r.end) + two; two-three > step/100 {
		return more, nil
	}
	return m, nil
}

// rehearsed returns the passes of a choice. Their seconds are in proportion to the tokens.
func (s *search) rehearsed(cfg *config.Config, m *Memory) (*rehearsal, error) {
	key := dropped{cfg.Memory.Recompute, m.Layers.Nothing}
	r := s.passes[key]
	if r == nil {
		r = &rehearsal{batch: 1, tokens: 1, share: float64(sequences(cfg) * s.demand.tokens), attention: s.attention,
			seconds: func(w cost.Work) float64 { return w.FLOPs() / s.rate }} // of products
		if err := r.run(cfg, m, s.demand); err != nil {
			return nil, err
		}
		s.passes[key] = r
	}
	return r, nil
}

// gather returns the seconds of gathering a parameter over all ranks, or inside a host if each has a copy.
func (s *search) gather(copies int) float64 {
	ranks, link := s.ranks, reached*cmp.Or(float64(s.machine.Link), plainBus)
	if copies > 1 {
		ranks = s.machine.PerHost(ranks)
	} else if s.machine.Hosts > 1 {
		link = cmp.Or(float64(s.machine.Net), plainNet)
	}
	return float64(backend.DType(s.cfg).Size()) * float64(ranks-1) / float64(ranks) / link
}

// upTo returns the chunks of the loss for a number of tokens, the largest first.
func upTo(tokens int) (chunks []int) {
	for _, n := range lossChunks {
		if c := max(min(n, tokens), tokens/config.MaxPieces); len(chunks) == 0 || c < chunks[len(chunks)-1] {
			chunks = append(chunks, c)
		}
	}
	return chunks
}
