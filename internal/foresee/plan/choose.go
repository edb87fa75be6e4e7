package plan

import (
	"cmp"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
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
		chunks = upTo(max(1, tokens))
		good = min(goodChunks, len(chunks))
	}
	s := search{cfg: cfg, ranks: ranks, machine: machine, demand: d, speed: speedOf(cfg, ranks, machine, d)}
	list := choices(cfg.Memory, machine)
	err := s.over(list, chunks[:good])
	if err == nil && !s.memory.Fits && good < len(chunks) {
		err = s.over(list, chunks[good:])
	}
	cfg.Memory = s.best
	if cfg.Checkpoint.Async == nil && s.memory.Fits {
		cfg.Checkpoint.Async = new(s.memory.HostSnapshot == s.memory.snapshot)
	}
	return s.memory, err
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
	c := auto
	for _, c.Offload = range open(auto.Offload, offloads) {
		for _, c.Recompute = range open(auto.Recompute, recomputes) {
			for _, c.Shard = range open(auto.Shard, shards) {
				list = append(list, c)
			}
		}
	}
	return list
}

// A search finds the fastest choice that fits.
type search struct {
	cfg     *config.Config
	ranks   int
	machine machine.Machine
	demand  *demand
	speed   speed

	best    config.Memory
	memory  Memory // of best
	seconds float64
}

// over considers choices with these chunks. Among equals the first wins, so that nothing changes without a need.
func (s *search) over(list []config.Memory, chunks []int) error {
	cfg := *s.cfg
	for _, cfg.Memory = range list {
		for _, cfg.Memory.LossChunk = range chunks {
			m, err := memoryOf(&cfg, s.ranks, s.machine, s.demand)
			if err != nil {
				return err
			}
			t := s.speed.extra(&cfg.Memory, &m)
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

// A speed has rough times of a run, by published figures of the device. They order the choices, so that these are the
// same with and without a cost table.
type speed struct {
	layers              int
	products, attention float64 // seconds of a layer's forward pass
	again               float64 // of the products that selective recompute repeats
	gather, inside      float64 // seconds of gathering the weights of a layer, over all ranks and inside a host
	micro               int     // passes in a step
	host                float64 // bytes a second to and from the host
}

const (
	reached  = 0.6   // share of the published peak that products and attention reach
	plainGPU = 1e14  // FLOP/s of an unknown device
	plainNet = 50e9  // bytes a second of an unknown link to other hosts
	plainBus = 450e9 // and inside a host
)

func speedOf(cfg *config.Config, ranks int, on machine.Machine, d *demand) speed {
	m := &cfg.Model.Config
	rate := plainGPU
	if peak := on.Peak(); peak > 0 {
		rate = reached * peak
	}
	tokens := float64(sequences(cfg) * d.tokens)
	flat := model.NewLayout(m, 1)
	weights := flat.Buckets[flat.Layer(0)].Size()
	if flat.Frozen != nil {
		weights += flat.Frozen.Buckets[flat.Layer(0)].Size()
	}
	pairs := 0.0
	for l := range m.NumHiddenLayers {
		pairs += model.VisiblePairs([]int{cfg.Data.SeqLen}, m.Layer(l).Mixer.Window)
	}
	pairs *= float64(sequences(cfg)) / float64(m.NumHiddenLayers*cfg.Parallel.Context)
	link := cmp.Or(float64(on.Link), plainBus)
	if on.Hosts > 1 {
		link = cmp.Or(float64(on.Net), plainNet)
	}
	part := func(n int) float64 { return float64(n-1) / float64(n) }
	bytes := float64(int64(backend.DType(cfg).Size()) * weights)
	return speed{
		layers:    m.NumHiddenLayers,
		products:  2 * float64(weights) * tokens / rate,
		again:     2 * float64(weights-int64(m.HiddenSize*m.IntermediateSize)) * tokens / rate, // all but Wdown's
		attention: 4 * float64(m.NumAttentionHeads*m.HeadDim) * pairs / rate,
		gather:    bytes * part(ranks) / link,
		inside:    bytes * part(on.PerHost(ranks)) / cmp.Or(float64(on.Link), plainBus),
		micro:     cfg.Train.GlobalBatchSize / (sequences(cfg) * cfg.Parallel.Data),
		host:      on.HostRate(ranks),
	}
}

// extra returns the seconds that a choice adds to a step.
func (s *speed) extra(c *config.Memory, m *Memory) float64 {
	forward := s.products + s.attention
	again := map[string]float64{"selective": s.again, "full": forward}[c.Recompute]
	backward := 2*s.products + 2.5*s.attention + again
	layers := float64(s.layers)
	t := layers*again + float64(m.Layers.Nothing)*forward
	if c.Shard == "parameters" { // gradients gathers once a step
		gather := s.gather
		if m.Copies > 1 {
			gather = s.inside
		}
		t += layers * (exposedCopy(gather, forward) + exposedCopy(gather, backward))
	}
	return float64(s.micro)*t + m.offloading(s.host, forward, backward, s.layers, s.micro)
}

// contention is the share of a hidden copy's time that it costs the work beside it.
const contention = 0.02

// exposedCopy returns the time that a copy adds to the work beside it.
func exposedCopy(copy, work float64) float64 { return max(copy-work, contention*copy) }

// upTo returns the chunks of the loss for a number of tokens, the largest first.
func upTo(tokens int) (chunks []int) {
	for _, n := range lossChunks {
		if c := max(min(n, tokens), tokens/config.MaxPieces); len(chunks) == 0 || c < chunks[len(chunks)-1] {
			chunks = append(chunks, c)
		}
	}
	return chunks
}

func mostTokens(cfg *config.Config) (int, error) {
	shape, err := shapeOf(cfg, nil, widest(cfg))
	if err != nil {
		return 0, err
	}
	most := 0
	for r := range shape.Size {
		most = max(most, partition.Count(shape.Layout.Spans(shape.SeqQ, shape.Size, r)))
	}
	return most * cfg.Train.MicroBatchSize, nil
}
