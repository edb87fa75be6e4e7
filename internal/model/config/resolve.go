package config

import (
	"math"
	"slices"
)

// Resolve replaces autos by values for these ranks and this device ("cuda", or the CPU), and checks the rules that
// depend on them. The error is Errors. Some keys may stay auto: parallel.ulysses_degree without hierarchical;
// parallel.gather with all ranks on one host, since layers may differ; parallel.deadline, which depends on step times;
// parallel.transport, on the links; checkpoint.async, on the host's memory; attention.backend, on the GPU and its
// libraries; and on a GPU memory.recompute, loss_chunk, shard and offload, on its memory.
func (c *Config) Resolve(ranks int, device string) error {
	f := newFaults(c.where)
	c.resolve(ranks, 1, device, f)
	return f.err()
}

// ResolveEpochs replaces train.epochs by samples, given those of an epoch, and by steps, and lr_schedule.warmup_ratio
// by its share of them. The error is Errors.
func (c *Config) ResolveEpochs(samples int64) error {
	t, f := &c.Train, newFaults(c.where)
	if t.Epochs == 0 {
		return nil
	}
	if samples > maxSamples/int64(t.Epochs) {
		f.add("train.epochs", "%d of %d samples each are too many; write fewer", t.Epochs, samples)
		return f.err()
	}
	t.Samples, t.Epochs, c.counted = t.Epochs*int(samples), 0, true
	return c.ResumeAt(0, 0)
}

// ResumeAt counts the steps again for a run that has already done some steps with some samples, unless the config has
// train.steps. Then and at the first start the batches may have different sizes.
func (c *Config) ResumeAt(step, samples int64) error {
	if !c.counted {
		return nil
	}
	f := newFaults(c.where)
	c.countSteps(step, samples, f)
	c.warmup(f)
	return f.err()
}

func (c *Config) countSteps(step, samples int64, f *faults) {
	t, key := &c.Train, "train.samples"
	if c.where.given("train.epochs") {
		key = "train.epochs"
	}
	if t.Steps = t.StepsFrom(step, samples); t.Steps > maxInt {
		f.add(key, "%d samples in batches of %d are more than %d steps; write fewer, or a larger train.global_batch_size",
			t.Samples, t.GlobalBatchSize, maxInt)
	}
}

// StepsFrom returns the number of the step in which Samples are reached, after some steps with some samples.
func (t *Train) StepsFrom(step, samples int64) int {
	batch := int64(t.GlobalBatchSize)
	return int(step + (max(0, int64(t.Samples)-samples)+batch-1)/batch)
}

// warmup resolves and checks the steps of the warmup, if those of the run are known.
func (c *Config) warmup(f *faults) {
	t, s := &c.Train, &c.LRSchedule
	if t.Steps == 0 || !f.ok("lr_schedule.warmup_steps", "lr_schedule.warmup_ratio", "train.steps", "train.epochs") {
		return
	}
	if s.WarmupRatio > 0 {
		c.ratio, s.WarmupRatio = s.WarmupRatio, 0
	}
	if c.ratio > 0 {
		s.WarmupSteps = int(math.Ceil(c.ratio * float64(t.Steps)))
	}
	if s.WarmupSteps > t.Steps {
		f.add("lr_schedule.warmup_steps", "%d is more than train.steps, which is %d; lower one or raise the other",
			s.WarmupSteps, t.Steps)
	}
}

func (c *Config) resolve(ranks, hosts int, device string, f *faults) {
	if device != "cuda" {
		cpuRules(c, f)
	}
	c.resolveGroups(ranks, f)
	compute := "fp32"
	if device == "cuda" {
		compute = "bf16"
	}
	c.resolveStrategy(ranks, hosts, device, f)
	if hosts > 1 && c.readsGather() {
		auto(&c.Parallel.Gather, "beside") // links between hosts are slower, so overlap hides more
	}
	auto(&c.Precision.Compute, compute)
	if ranks == 1 {
		auto(&c.Memory.Shard, "none")
	}
	if c.Precision.GradWire == "bf16" && c.Memory.Shard == "none" && ranks > 1 &&
		f.ok("precision.grad_wire", "memory.shard") {
		f.add("precision.grad_wire", "bf16 needs ranks that sum parts of the gradients, which memory.shard: none "+
			"excludes; write memory.shard: optimizer, or fp32")
	}
	if n := c.Parallel.Context; n > 1 && f.ok("train.micro_batch_size", "parallel.context", "data.pack_documents") &&
		!c.Data.Packs() && c.Train.MicroBatchSize > maxShares/n {
		f.add("train.micro_batch_size", "%d samples over %d ranks are more than %d parts, each of which is sent by "+
			"itself; write at most %d, or lower parallel.context", c.Train.MicroBatchSize, n, maxShares, max(1, maxShares/n))
	}
	if n := c.Memory.LossChunk; n > 0 && c.Parallel.Context > 0 &&
		f.ok("memory.loss_chunk", "data.seq_len", "train.micro_batch_size") && c.passTokens()/n > MaxPieces {
		f.add("memory.loss_chunk",
			"%d cuts the %d tokens of a pass on a rank into more than %d pieces; write %d or more, or auto", n,
			c.passTokens(), MaxPieces, c.passTokens()/MaxPieces+1)
	}
	if device == "cuda" {
		return
	}
	auto(&c.Memory.Shard, "optimizer") // ranks on a CPU share its cores, and memory is plentiful
	auto(&c.Memory.Recompute, "none")
	auto(&c.Memory.Offload, "off")
	if c.Memory.LossChunk == 0 && c.Parallel.Context > 0 && f.ok("memory.loss_chunk") {
		c.Memory.LossChunk = max(1, min(1024, c.passTokens()), c.passTokens()/MaxPieces)
	}
}

// idle reports values of memory and precision without effect on these ranks and this device.
func (c *Config) idle(ranks int, device string, to *faults) {
	m := &c.Memory
	if ranks == 1 && m.Shard != "none" && m.Shard != "auto" {
		to.add("memory.shard", "%s has no effect on 1 rank; write auto", m.Shard)
	}
	if ranks == 1 && c.Precision.GradWire == "bf16" {
		to.add("precision.grad_wire", "bf16 has no effect on 1 rank; write fp32")
	}
	if device != "cuda" && m.Offload != "off" && m.Offload != "auto" {
		to.add("memory.offload", "%s saves nothing on a CPU, which has one memory; write auto", m.Offload)
	}
}

func (c *Config) passTokens() int {
	return (c.Data.SeqLen + c.Parallel.Context - 1) / c.Parallel.Context * c.Train.MicroBatchSize
}

// resolveGroups sets parallel.context and parallel.data. Their product is the number of ranks.
func (c *Config) resolveGroups(ranks int, f *faults) {
	const contextKey, dataKey = "parallel.context", "parallel.data"
	p := &c.Parallel
	if ranks < 1 || !f.ok(contextKey, dataKey) {
		return
	}
	if ranks > maxRanks {
		f.add(contextKey, "%d ranks are too many; start at most %d", ranks, maxRanks)
		return
	}
	const fix = "write auto, or start another number of processes with --nproc"
	switch {
	case p.Context > 0 && p.Data > 0:
		if p.Context*p.Data != ranks {
			f.add(contextKey, "context %d x data %d is %d, but the number of ranks is %d; %s", p.Context, p.Data,
				p.Context*p.Data, ranks, fix)
			return
		}
	case p.Context > 0:
		if ranks%p.Context != 0 {
			f.add(contextKey, "%d does not divide the number of ranks, %d; take one of %s, or %s", p.Context, ranks,
				divisors(ranks), fix)
			return
		}
		p.Data = ranks / p.Context
	case p.Data > 0:
		if ranks%p.Data != 0 {
			f.add(dataKey, "%d does not divide the number of ranks, %d; take one of %s, or %s", p.Data, ranks,
				divisors(ranks), fix)
			return
		}
		p.Context = ranks / p.Data
	default:
		p.Context, p.Data = ranks, 1
	}
	if unit := c.Train.MicroBatchSize * p.Data; f.ok("train.global_batch_size", "train.micro_batch_size") &&
		c.Train.GlobalBatchSize%unit != 0 {
		f.add("train.global_batch_size", "%d is not a multiple of micro_batch_size %d x parallel.data %d; take %s",
			c.Train.GlobalBatchSize, c.Train.MicroBatchSize, p.Data, multiples(c.Train.GlobalBatchSize, unit))
	}
}

// resolveStrategy sets the layout, the algorithm and parallel.ulysses_degree, which must divide parallel.context.
func (c *Config) resolveStrategy(ranks, hosts int, device string, f *faults) {
	const innerKey = "parallel.ulysses_degree"
	p := &c.Parallel
	by := RunShape{
		Device: device, Documents: c.Data.PackDocuments, PerHost: ranks,
		Heads: c.Model.NumAttentionHeads, KVHeads: c.Model.NumKeyValueHeads,
	}
	if n := c.Model.NumGlobalKeyValueHeads; n > 0 {
		by.KVHeads = min(by.KVHeads, n)
	}
	if hosts > 1 {
		if by.PerHost = 1; ranks%hosts == 0 {
			by.PerHost = ranks / hosts
		}
	}
	if f.ok("parallel.context", innerKey, "model.from", "model.num_attention_heads", "model.num_key_value_heads") {
		by.Ranks = p.Context
	}
	p.Strategy = DefaultStrategy(p.Strategy, by)
	known := p.Context > 0 && p.Inner > 0 && f.ok("parallel.context", innerKey)
	if known && p.Algorithm == "hierarchical" && p.Context%p.Inner != 0 {
		f.add(innerKey, "%d does not divide the %d ranks of parallel.context; take one of %s, or write auto",
			p.Inner, p.Context, divisors(p.Context))
	}
}

// reportUnused adds to a fault for each given key without effect under the chosen algorithm, and resets the key.
func (c *Config) reportUnused(given Parallel, f, to *faults) {
	p := &c.Parallel
	add := func(key string, value any, instead, reader string) {
		to.add(key, "%v has no effect with parallel.algorithm %s; write %s, or parallel.algorithm: %s", value,
			p.Algorithm, instead, reader)
	}
	if n := given.Inner; n > 0 && p.Algorithm != "hierarchical" && f.ok("parallel.ulysses_degree") {
		add("parallel.ulysses_degree", n, "auto", "hierarchical")
		p.Inner = 0
	}
	if n := given.GatherHeads; n > 0 && p.Algorithm != "allgather" && f.ok("parallel.gather_heads") {
		add("parallel.gather_heads", n, "0", "allgather")
		p.GatherHeads = 0
	}
	windows := f.ok("model.from", "model.layer_types", "model.num_hidden_layers", "model.sliding_window")
	if given.Gather != "auto" && windows && f.ok("parallel.gather") && !c.readsGather() {
		add("parallel.gather", given.Gather, "auto", "allgather")
		p.Gather = "auto"
	}
}

// readsGather reports whether rows of other ranks may arrive in one hop: in an all-gather, and in a window except under
// ulysses, where every rank has all rows.
func (c *Config) readsGather() bool {
	windowed := slices.ContainsFunc(c.Model.Windows(), func(w int) bool { return w >= 0 })
	return c.Parallel.Algorithm == "allgather" || windowed && c.Parallel.Algorithm != "ulysses"
}

func cpuRules(c *Config, f *faults) {
	if t := c.Parallel.Transport; f.ok("parallel.transport") && t != "auto" {
		f.add("parallel.transport", "%s moves data between GPUs; on CPU write auto", t)
	}
	if n := c.Attention.SMMargin; f.ok("attention.sm_margin") && n > 0 {
		f.add("attention.sm_margin", "%d leaves processors of a GPU free; on CPU write 0", n)
	}
	if c.Parallel.Backend == "fused" && f.ok("attention.backend") {
		f.add("attention.backend", "fused is cuDNN and needs CUDA; on CPU write flash or reference")
	}
}
