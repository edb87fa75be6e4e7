package source

// flashHalf are the shapes for bfloat16 and float16.
var flashHalf = []FlashShape{
	{QK: 32, V: 32, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 64, V: 64, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 96, V: 96, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 96, V: 96, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 128, V: 128, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 128, V: 128, Rows: 128, Step: 64, Warps: 4, Queries: 32, Keys: 128, Stages: 1, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 192, V: 128, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 192, V: 128, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 192, V: 192, Rows: 128, Step: 64, Warps: 8, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 192, V: 192, Rows: 128, Step: 64, Warps: 8, Queries: 32, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 256, V: 256, Rows: 128, Step: 64, Warps: 8, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 32, OrderedWarps: 4},
	{QK: 256, V: 256, Rows: 128, Step: 32, Warps: 8, Queries: 32, Keys: 32, Stages: 1, BackwardWarps: 4, SWarps: 2,
		KeyWarps: 1, DQWarps: 1, OrderedRows: 64, OrderedStep: 32, OrderedWarps: 4},
}

// flashSingle are those for float32. Elements take twice the room, and every thread multiplies what it
// loads from shared memory, which it does the seldomer the more of a product it has in registers: so
// blocks are as large as the room allows, and one stage has to do. Head dims up to 96, and those of v
// that are smaller than those of k, have no shapes of their own: such models train in 16 bits.
var flashSingle = []FlashShape{
	{Float32: true, QK: 32, V: 32, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 4,
		SWarps: 4, KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{Float32: true, QK: 64, V: 64, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 1, BackwardWarps: 8,
		SWarps: 4, KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{Float32: true, QK: 64, V: 64, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8,
		SWarps: 4, KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{Float32: true, QK: 128, V: 128, Rows: 128, Step: 64, Warps: 8, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8,
		SWarps: 4, KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 32, OrderedWarps: 4},
	{Float32: true, QK: 128, V: 128, Rows: 64, Step: 32, Warps: 4, Queries: 32, Keys: 32, Stages: 1, BackwardWarps: 4,
		SWarps: 2, KeyWarps: 2, DQWarps: 2, OrderedRows: 32, OrderedStep: 32, OrderedWarps: 4},
	{Float32: true, QK: 192, V: 192, Rows: 128, Step: 32, Warps: 8, Queries: 32, Keys: 64, Stages: 1, BackwardWarps: 8,
		SWarps: 2, KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 32, OrderedWarps: 4},
	{Float32: true, QK: 192, V: 192, Rows: 32, Step: 32, Warps: 4, Queries: 16, Keys: 32, Stages: 1, BackwardWarps: 4,
		SWarps: 2, KeyWarps: 2, DQWarps: 2, OrderedRows: 16, OrderedStep: 32, OrderedWarps: 2},
	{Float32: true, QK: 256, V: 256, Rows: 64, Step: 32, Warps: 4, Queries: 32, Keys: 32, Stages: 1, BackwardWarps: 8,
		SWarps: 4, KeyWarps: 2, DQWarps: 2, OrderedRows: 32, OrderedStep: 32, OrderedWarps: 4},
	{Float32: true, QK: 256, V: 256, Rows: 16, Step: 32, Warps: 2, Queries: 16, Keys: 16, Stages: 1, BackwardWarps: 2,
		SWarps: 2, KeyWarps: 1, DQWarps: 2, OrderedRows: 16, OrderedStep: 32, OrderedWarps: 2},
}
