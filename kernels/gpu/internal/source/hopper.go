package source

import "fmt"

// HopperShape holds the tile sizes of the kernels for Hopper, for head dims up to QK, of queries and keys, and V, of
// values.
type HopperShape struct {
	QK, V int
	// Forward pass: blocks of Groups times 64 queries take Step keys at once, or CappedStep if scores need more than a
	// factor.
	Groups, Step, CappedStep int
	// Wide gives warpgroups of the forward pass roles: one computes probabilities, two hold half of O's columns each.
	Wide bool
	// Backward pass: blocks of KeyGroups times 64 keys take Queries or CappedQueries queries at once, in Stages
	// buffers.
	KeyGroups, Queries, CappedQueries, Stages int
	// Split makes the warpgroups of the backward pass share 64 keys: each computes the scores of its part of the
	// queries, and owns its part of the columns of dK and dV.
	Split bool
	// Cluster is the number of blocks of the backward pass that compute a block of keys, each a part of the head dim; 0
	// is 1. Together with Split only.
	Cluster int
	// SharedP makes products read probabilities from shared memory, not from registers. It is slower and for tests: the
	// bits differ only if the compiler assigned wrong registers.
	SharedP bool
	// EveryLane makes all lanes of a warp arrive at a barrier, not one. It is slower and for tests: compute-sanitizer's
	// racecheck attributes an arrival only to the lane's own accesses.
	EveryLane bool
}

// HopperShapes lists the compiled shapes in ascending order of head dims. Steps are as wide as registers and shared
// memory allow.
var HopperShapes = []HopperShape{
	{QK: 64, V: 64, Groups: 3, Step: 128, CappedStep: 96, KeyGroups: 2, Queries: 96, CappedQueries: 64, Stages: 2},
	{QK: 96, V: 96, Groups: 2, Step: 128, CappedStep: 128, KeyGroups: 2, Queries: 64, CappedQueries: 48, Stages: 2},
	{QK: 128, V: 128, Groups: 2, Step: 176, CappedStep: 128, KeyGroups: 2, Queries: 64, CappedQueries: 48, Stages: 2},
	{QK: 192, V: 128, Groups: 2, Step: 128, CappedStep: 128, KeyGroups: 2, Queries: 48, CappedQueries: 48, Stages: 2},
	{QK: 256, V: 256, Groups: 2, Step: 80, CappedStep: 80, KeyGroups: 2, Queries: 64, CappedQueries: 64, Stages: 2,
		Split: true},
	{QK: 512, V: 512, Groups: 1, Step: 128, CappedStep: 128, Wide: true, KeyGroups: 2, Queries: 64, CappedQueries: 64,
		Stages: 2, Split: true, Cluster: 2},
}

// hopperArchs lists the architectures with wgmma.
var hopperArchs = []string{"sm_90a"}

// HopperShapeFor returns the first shape for these head dims; ok is false if there is none.
func HopperShapeFor(qk, v int) (s HopperShape, ok bool) {
	for _, s := range HopperShapes {
		if qk <= s.QK && v <= s.V {
			return s, true
		}
	}
	return HopperShape{}, false
}

// Rows returns the number of queries in a block of the forward pass.
func (s HopperShape) Rows() int { return 64 * s.Groups }

// Threads returns the number of threads in a block of the forward pass.
func (s HopperShape) Threads() int { return 128 * (s.consumers() + 1) }

// consumers returns the number of warpgroups in a block of the forward pass that load nothing.
func (s HopperShape) consumers() int {
	if s.Wide {
		return 3
	}
	return s.Groups
}

// ForwardBoxes returns the rows of the TMA boxes of K and of V.
func (s HopperShape) ForwardBoxes(capped bool) (k, v int) {
	k = s.Keys(capped)
	if s.Wide {
		return k, 32
	}
	return k, k
}

// hopperRegisters holds the registers of a producer and of a consumer thread, for each number of consumer warpgroups. A
// block has at most the 65536 registers of an SM, and at most its registers at launch.
var hopperRegisters = map[int][2]int{2: {40, 232}, 3: {32, 160}}

// wideRegisters holds those of a producer and of a thread with a part of O in a wide pass. The other warpgroup gets the
// remainder.
var wideRegisters = [2]int{40, 176}

// option returns the part of a program's name for an option, and its constant.
func option(has bool, name, constant string) (string, define) {
	if has {
		return "_" + name, define{constant, 1}
	}
	return "", define{constant, 0}
}

// options returns the part of a program's name for the options, and their constants.
func (s HopperShape) options(capped bool) (name string, constants []define) {
	a, score := option(capped, "capped", "CAP")
	b, shared := option(s.SharedP, "shared_p", "SHARED_P")
	c, lanes := option(s.EveryLane, "every_lane", "EVERY_LANE")
	return a + b + c, []define{score, shared, lanes, {"INLINE_TILES", FlashTiles}}
}

// ahead returns the number of blocks of keys that the forward pass buffers: two, if shared memory allows.
func (s HopperShape) ahead() int {
	if s.SharedP {
		return 1
	}
	return 2
}

// Keys returns the number of keys in a step of the forward pass. capped means that scores need more than a factor.
func (s HopperShape) Keys(capped bool) int {
	if capped {
		return s.CappedStep
	}
	return s.Step
}

// Forward returns the program of the forward pass.
func (s HopperShape) Forward(capped bool) Program {
	registers, keys := hopperRegisters[s.consumers()], s.Keys(capped)
	name, constants := s.options(capped)
	file, entries := "hopper_forward.cu", []Entry(nil)
	if s.Wide {
		registers = wideRegisters
		file, constants = "hopper_wide.cu", append(constants, define{"HEAD", s.V})
		entries = spilling("hopper_forward_", 24, "addresses, once a block of queries")
	} else {
		constants = append(constants, define{"HEAD_QK", s.QK}, define{"HEAD_V", s.V}, define{"GROUPS", s.Groups},
			define{"STAGES", s.ahead()})
	}
	return Program{
		Name: fmt.Sprintf("hopper_forward%s_%d_%d_%dx%d", name, s.QK, s.V, s.Rows(), keys), File: file,
		Archs: hopperArchs, Entries: entries,
		Defines: defines(append(constants, define{"BN", keys},
			define{"PRODUCER_REGISTERS", registers[0]}, define{"CONSUMER_REGISTERS", registers[1]})...),
	}
}

// queries returns the number of queries in a step of the backward pass.
func (s HopperShape) queries(capped bool) int {
	if capped {
		return s.CappedQueries
	}
	return s.Queries
}

// OwnKeys returns the number of keys that a block of the backward pass owns.
func (s HopperShape) OwnKeys() int {
	if s.Split {
		return 64
	}
	return 64 * s.KeyGroups
}

// Blocks returns the number of blocks of a cluster of the backward pass.
func (s HopperShape) Blocks() int { return max(1, s.Cluster) }

// spilling lists the kernels of both types, which may use that much local memory.
func spilling(kernel string, local int, why string) (list []Entry) {
	for _, name := range []string{"bf16", "fp16"} {
		list = append(list, Entry{Name: kernel + name, Local: local, Why: why})
	}
	return list
}

// Backward returns the program of the backward pass. ordered adds to dQ in a fixed order.
func (s HopperShape) Backward(capped, ordered bool) Program {
	queries := s.queries(capped)
	name, constants := s.options(capped)
	turn, order := option(ordered, "ordered", "ORDERED")
	_, split := option(s.Split, "", "SPLIT")
	// A producer has 24 registers.
	const why = "warps that load, or bring LSE and delta, ahead of their step lack two to four registers, once a step"
	var entries []Entry
	switch {
	case s.QK == 128 && !capped && (ordered || s.SharedP), s.QK == 192: // SharedP: for tests only
		entries = spilling("hopper_backward_", 24, why)
	case s.QK == 128 && !capped:
		entries = spilling("hopper_backward_", 16, why)
	}
	return Program{
		Entries: entries,
		Name: fmt.Sprintf("hopper_backward%s%s_%d_%d_%dx%dx%d", turn, name, s.QK, s.V, queries, s.OwnKeys(),
			s.Stages), File: "hopper_backward.cu", Archs: hopperArchs,
		Defines: defines(append(constants,
			define{"HEAD_QK", s.QK / s.Blocks()}, define{"HEAD_V", s.V / s.Blocks()}, define{"GROUPS", s.KeyGroups},
			define{"BM", queries}, define{"STAGES", s.Stages}, define{"CLUSTER", s.Blocks()}, order, split,
		)...),
	}
}

// BackwardBoxes returns the rows of the TMA boxes of Q and dO, and of dQ. A warpgroup's part of dQ has dqPanels panels
// of 64 columns.
func (s HopperShape) BackwardBoxes(capped bool) (queries, dqRows, dqPanels int) {
	queries, panels := s.queries(capped), (s.QK/s.Blocks()+63)/64
	if panels%s.KeyGroups == 0 {
		return queries, queries, panels / s.KeyGroups
	}
	return queries, queries / s.KeyGroups, panels
}

// BackwardShared returns the shared memory of a block of the backward pass, in bytes: K, V, two buffers of dS, dQ, the
// stages of Q, dO, LSE and delta, and synchronisation. With Split, it has one buffer of dO, of P and of dS, and a panel
// of dQ for each warpgroup. In a cluster it has a part of the head dim, and scores of the other block.
func (s HopperShape) BackwardShared(capped bool) int {
	queries, dqRows, dqPanels := s.BackwardBoxes(capped)
	qk, v := s.QK/s.Blocks(), s.V/s.Blocks()
	const step, turn, barrier = 32, 32, 8
	keys := panels(s.OwnKeys(), qk) + panels(s.OwnKeys(), v) + 4*s.OwnKeys()
	stage, douts, scores := panels(queries, qk)+step+2*4*queries+2*barrier, s.Stages*panels(queries, v), 2
	if s.Split {
		douts, scores, dqPanels = panels(queries, v)+2*barrier, 2, 1
	}
	if s.Cluster > 1 {
		keys += 4*queries*s.OwnKeys() + 4*barrier*s.KeyGroups
	}
	if s.SharedP {
		scores++
	}
	return keys + scores*panels(queries, s.OwnKeys()) + s.KeyGroups*4*dqRows*64*dqPanels + s.Stages*stage + douts +
		turn + barrier
}

// panels returns the shared memory of a matrix of 16-bit elements, in panels of 64 columns.
func panels(rows, columns int) int { return 2 * rows * ((columns + 63) / 64 * 64) }

// ForwardShared returns the shared memory of a block of the forward pass, in bytes: Q, two blocks of K and of V, and
// synchronisation. With Wide, it has Q, four pieces of K and of V, two buffers of probabilities, and the softmax and
// steps of these.
func (s HopperShape) ForwardShared(capped bool) int {
	const words = 256
	keys := s.Keys(capped)
	if s.Wide {
		return panels(s.Rows(), s.QK+2*keys) + 4*(panels(keys, 64)+panels(32, s.V/2)) + 2*(32+3*4*s.Rows()) + words
	}
	bytes := panels(s.Rows(), s.QK) + s.ahead()*(panels(keys, s.QK)+panels(keys, s.V)) + words
	if s.SharedP {
		bytes += panels(s.Rows(), keys)
	}
	return bytes
}

// hopper holds cprun's own attention kernels for Hopper.
var hopper = hopperPrograms()

func hopperPrograms() (list []Program) {
	for _, s := range HopperShapes {
		list = append(list, s.Forward(false), s.Forward(true))
		list = append(list, s.Backward(false, false), s.Backward(true, false), s.Backward(false, true),
			s.Backward(true, true))
	}
	list = append(list, HopperSharedP.Forward(false), HopperSharedP.Backward(false, true))
	for _, s := range HopperEveryLane {
		list = append(list, s.Forward(false), s.Backward(false, false), s.Backward(false, true))
	}
	return list
}

// HopperSharedP is the shape of head dim 128 with probabilities in shared memory.
var HopperSharedP = hopperTest(128, func(s *HopperShape) { s.SharedP = true })

// HopperEveryLane lists shapes whose warps arrive with every lane: with two buffers of dO, with one, and in clusters,
// with roles in the forward pass.
var HopperEveryLane = []HopperShape{
	hopperTest(128, func(s *HopperShape) { s.EveryLane = true }),
	hopperTest(256, func(s *HopperShape) { s.EveryLane = true }),
	hopperTest(512, func(s *HopperShape) { s.EveryLane = true }),
}

// hopperTest returns the shape of a head dim, changed for tests.
func hopperTest(dim int, change func(*HopperShape)) HopperShape {
	s, _ := HopperShapeFor(dim, dim)
	change(&s)
	return s
}
