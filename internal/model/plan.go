package model

import (
	"cmp"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/kernels"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Memory is the memory of a model's passes on one device in bytes, without parameters and buffers of attention's
// transfers.
type Memory struct {
	// Activations is the exact peak of an arena during ForwardBackward.
	Activations int64
	// Host is the memory of the activations that Keep and Bring move in a pass.
	Host int64
	// Validation is the peak during Forward.
	Validation int64
	// Kept has the bytes of the activations that each layer keeps.
	Kept []int64
}

// Plan returns the memory of a model for micro batches of batch samples with localTokens tokens each on this rank,
// computed in dtype. It runs the training code over an arena without memory and operations that do nothing, so it
// matches the run.
func Plan(cfg *hf.Config, opt Options, batch, localTokens int, dtype tensor.DType) Memory {
	m := phantomModel(cfg, nopOps{}, nopAttention{Still{opt.Segments, opt.States}}, opt, dtype)
	b, loss := phantomBatch(cfg, batch, localTokens)
	var plan Memory
	p := m.pass(tensor.NewMeter(), b)
	for i := range p.layers {
		plan.Kept = append(plan.Kept, p.kept(i))
	}
	for _, s := range p.place() {
		for _, v := range s.moved {
			plan.Host += int64(v.Size()) * int64(v.DType().Size())
		}
	}
	train, validate := m.pass(tensor.NewMeter(), b), m.pass(tensor.NewMeter(), b)
	train.dry, validate.dry = true, true
	if err := cmp.Or(train.forwardBackward(loss, 1), validate.forward(loss)); err != nil {
		panic("model: a plan met an error, which its operations do not return: " + err.Error())
	}
	plan.Activations, plan.Validation = train.a.Peak(), validate.a.Peak()
	return plan
}

// Rehearse runs a forward and a backward pass over an arena without memory. It passes all calls of a real run to ops
// and att.
func Rehearse(cfg *hf.Config, opt Options, batch, localTokens int, dtype tensor.DType, ops Ops, att Attention) error {
	b, loss := phantomBatch(cfg, batch, localTokens)
	return phantomModel(cfg, ops, att, opt, dtype).ForwardBackward(tensor.NewMeter(), b, loss, 1)
}

// phantomModel returns a model over parameters without memory, which moves no activations.
func phantomModel(cfg *hf.Config, ops Ops, att Attention, opt Options, dtype tensor.DType) *Model {
	if opt.Hooks.Keep == nil {
		nop := func(int, []View) {}
		opt.Hooks.Keep, opt.Hooks.Bring = nop, nop
	}
	flat, meter := NewLayout(cfg, 1), tensor.NewMeter()
	params := func(l *FlatLayout) Params {
		vector := meter.Alloc(tensor.F32, 1, 1, 1, int(l.Size()))
		return Params{Layout: l, Weights: vector, Compute: meter.Alloc(dtype, 1, 1, 1, int(l.Size()-l.CodesSize())),
			Codes: meter.Alloc(tensor.U8, 1, 1, 1, int(l.CodesSize())), Factors: meter.Alloc(tensor.F32, l.FactorsSize())}
	}
	trained := params(flat)
	if trained.Grads = trained.Weights; flat.Frozen != nil {
		frozen := params(flat.Frozen)
		frozen.Unread = frozen.Weights
		trained.Frozen = &frozen
	}
	return New(cfg, ops, att, trained, opt)
}

// phantomBatch returns a batch without memory, and a sum of losses.
func phantomBatch(cfg *hf.Config, batch, tokens int) (b Batch, loss View) {
	ids := phantom(tensor.I32, batch, tokens, 1, 1)
	table := phantom(tensor.F32, batch, tokens, 1, cfg.AllPairs())
	return Batch{IDs: ids, Targets: ids, Tokens: ids, Cos: table, Sin: table}, phantom(tensor.F64, 1, 1, 1, 1)
}

func phantom(dtype tensor.DType, shape ...int) View { return tensor.NewMeter().Alloc(dtype, shape...) }

type nopOps struct{}

func (nopOps) Linear(_, _, _, _ View)                                                        {}
func (nopOps) LinearDX(_, _, _ View, _ bool)                                                 {}
func (nopOps) LinearDW(_, _, _ View, _ bool)                                                 {}
func (nopOps) Quantize(_, _ kernels.Scaled, _, _ View)                                       {}
func (nopOps) Transpose(_, _ View)                                                           {}
func (nopOps) ScaledLinear(_ View, _, _ kernels.Scaled, _ View)                              {}
func (nopOps) GroupQuantize(kernels.Scaled, kernels.Operand, View, kernels.Pairs)            {}
func (nopOps) GroupScaledLinear(View, kernels.Operand, kernels.Scaled, kernels.Pairs)        {}
func (nopOps) SumRows(_, _ View)                                                             {}
func (nopOps) RMSNorm(_, _, _, _ View, _ float64)                                            {}
func (nopOps) AddRMSNorm(_, _, _, _, _, _ View, _ float64)                                   {}
func (nopOps) RMSNormBackward(_, _, _, _, _, _ View, _ bool)                                 {}
func (nopOps) NormRope(_, _, _, _, _, _ View, _ float64)                                     {}
func (nopOps) NormRopeBackward(_, _, _, _, _, _, _, _ View)                                  {}
func (nopOps) GLU(_, _, _ View, _ kernels.Activation)                                        {}
func (nopOps) GLUBackward(_, _, _, _, _ View, _ kernels.Activation)                          {}
func (nopOps) Gate(_, _, _ View)                                                             {}
func (nopOps) GateBackward(_, _, _, _, _ View)                                               {}
func (nopOps) Affine(_, _ View, _, _ float64)                                                {}
func (nopOps) Scale(_, _, _ View)                                                            {}
func (nopOps) SoftCap(_ View, _ float64)                                                     {}
func (nopOps) Embed(_, _, _ View)                                                            {}
func (nopOps) EmbedBackward(_, _, _ View)                                                    {}
func (nopOps) CrossEntropy(_, _, _ View, _, _ float64, _ bool)                               {}
func (nopOps) Add(_, _ View)                                                                 {}
func (nopOps) Zero(_ ...View)                                                                {}
func (nopOps) Copy(_, _ View)                                                                {}
func (nopOps) Dropout(_, _, _ View, _ kernels.Dropout)                                       {}
func (nopOps) FoldSink(_, _, _ View) error                                                   { return nil }
func (nopOps) SinkGrad(_, _, _, _, _ View) error                                             { return nil }
func (nopOps) Route(_, _, _, _ View, _ kernels.Router)                                       {}
func (nopOps) RouteBackward(_, _, _, _, _, _ View, _ kernels.Router)                         {}
func (nopOps) ScaleChoices(_, _, _, _, _, _ View)                                            {}
func (nopOps) Count(_, _, _, _, _ View)                                                      {}
func (nopOps) Sort(kernels.Pairs, View)                                                      {}
func (nopOps) GroupLinear(_ View, _ kernels.Operand, _ View, _ kernels.Pairs, _ bool)        {}
func (nopOps) GroupLinearDX(_ View, _ kernels.Operand, _ View, _ kernels.Pairs, _ bool)      {}
func (nopOps) GroupLinearDW(_ View, _, _ kernels.Operand, _ kernels.Pairs, _ bool)           {}
func (nopOps) GroupAdd(_, _ View, _ kernels.Pairs)                                           {}
func (nopOps) GroupSum(_ View, _ kernels.Operand, _ View, _ kernels.Pairs)                   {}
func (nopOps) GroupDot(_ View, _ kernels.Operand, _ View, _ kernels.Pairs)                   {}
func (nopOps) GroupGLU(_, _ View, _ kernels.Activation)                                      {}
func (nopOps) GroupGLUBackward(_, _, _, _, _, _ View, _ kernels.Pairs, _ kernels.Activation) {}
func (nopOps) Combine(_, _, _, _ View, _ kernels.Pairs)                                      {}

func (nopOps) Conv(_, _, _, _ View, _ []partition.Range)                  {}
func (nopOps) ConvBackward(_, _, _, _, _, _, _ View, _ []partition.Range) {}
func (nopOps) Gates(_, _, _, _, _, _ View)                                {}
func (nopOps) GatesBackward(_, _, _, _, _, _, _, _, _, _, _ View)         {}

type nopAttention struct{ Still }

func (nopAttention) Forward(int, attention.Partial, View, View, View) error { return nil }

func (nopAttention) Backward(int, attention.Grads, View, View, View, View, attention.Partial) error {
	return nil
}

var (
	_ Ops       = nopOps{}
	_ Attention = nopAttention{}
)
