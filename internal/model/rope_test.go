package model

import (
	"math"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// scripts/oracle/rope.py wrote testdata/rope.json with transformers.
func TestRopeEqualsTransformers(t *testing.T) {
	var oracle struct {
		Positions []int
		Cases     map[string]struct {
			HeadDim         int            `json:"head_dim"`
			RopeTheta       float64        `json:"rope_theta"`
			Longest         int            `json:"max_position_embeddings"`
			Partial         float64        `json:"partial_rotary_factor"`
			RopeScaling     hf.RopeScaling `json:"rope_scaling"`
			AttentionFactor float64        `json:"attention_factor"`
			ShortInvFreq    []float64      `json:"short_inv_freq"` // of short texts
			InvFreq         []float64      `json:"inv_freq"`       // of the positions
			Cos, Sin        [][]float64
		}
	}
	readJSON(t, "testdata/rope.json", &oracle)
	if len(oracle.Cases) == 0 {
		t.Fatal("no cases")
	}
	for name, want := range oracle.Cases {
		t.Run(name, func(t *testing.T) {
			if s := &want.RopeScaling; s.Type == "longrope" && s.Factor == 0 { // as hf.ReadConfig
				s.Factor = float64(want.Longest) / float64(s.OriginalMax)
			}
			rope := NewRope(&hf.Config{
				HeadDim: want.HeadDim, RopeTheta: want.RopeTheta, MaxPositionEmbedding: want.Longest,
				PartialRotaryFactor: want.Partial, RopeScaling: &want.RopeScaling,
			})
			near(t, "attention factor", rope.Factor, want.AttentionFactor, 1e-8)
			long := rope.InvFreq
			if rope.Long != nil {
				long = rope.Long
			}
			for i, f := range want.ShortInvFreq {
				// The power of torch may differ in the last bit, and so may each of the following roundings.
				near(t, "frequency", float64(rope.InvFreq[i]), f, f*4e-7)
				near(t, "frequency of a long text", float64(long[i]), want.InvFreq[i], want.InvFreq[i]*4e-7)
			}

			n, pairs := len(oracle.Positions), len(want.InvFreq)
			cos, sin := tensor.New(tensor.F32, 1, n, 1, pairs), tensor.New(tensor.F32, 1, n, 1, pairs)
			longest := oracle.Positions[n-1] + 1
			rope.Fill(cos, sin, oracle.Positions, slices.Repeat([]int{longest}, n))
			c, s := get(cos), get(sin)
			for j, p := range oracle.Positions {
				for i, f := range want.InvFreq {
					// This is the effect of the last bits of the frequency and of the angle.
					angle := float64(p) * math.Abs(f)
					tolerance := 2e-7 + 4e-7*angle
					if long[i] == float32(f) {
						tolerance = 3e-7
					}
					near(t, "cos", c[j*pairs+i], want.Cos[j][i], tolerance*rope.Factor)
					near(t, "sin", s[j*pairs+i], want.Sin[j][i], tolerance*rope.Factor)
				}
			}
		})
	}
}

// A document of the trained length has longrope's short factors, a longer one beside it the long factors.
func TestLongropeChoosesByDocument(t *testing.T) {
	cfg := &hf.Config{HeadDim: 2, RopeTheta: 100, RopeScaling: &hf.RopeScaling{Type: "longrope", Factor: 1,
		OriginalMax: 4, ShortFactor: []float64{2}, LongFactor: []float64{8}}}
	cos, sin := tensor.New(tensor.F64, 1, 3, 1, 1), tensor.New(tensor.F64, 1, 3, 1, 1)
	NewRope(cfg).Fill(cos, sin, []int{3, 3, 3}, []int{4, 5, 3})
	for i, want := range []float64{1.5, 0.375, 1.5} {
		near(t, "sin", get(sin)[i], math.Sin(want), 1e-15)
	}
}

func TestRopeFillsFloat64AndNoPositions(t *testing.T) {
	rope := NewRope(&hf.Config{HeadDim: 4, RopeTheta: 100})
	cos, sin := tensor.New(tensor.F64, 1, 2, 1, 2), tensor.New(tensor.F64, 1, 2, 1, 2)
	rope.Fill(cos, sin, []int{0, 3}, nil)
	for i, want := range []float64{1, 1, math.Cos(3), math.Cos(float64(3 * float32(0.1)))} {
		near(t, "cos", get(cos)[i], want, 1e-12)
	}
	near(t, "sin", get(sin)[2], math.Sin(3), 1e-12)
	rope.Fill(tensor.New(tensor.F32, 1, 0, 1, 2), tensor.New(tensor.F32, 1, 0, 1, 2), nil, nil)
}

// TestRopeBeyondFloat32 checks that neighbours have different angles where float32 has only even positions, and that
// positions up to there keep the angles of other libraries.
func TestRopeBeyondFloat32(t *testing.T) {
	rope := NewRope(&hf.Config{HeadDim: 4, RopeTheta: 100})
	positions := []int{1<<24 - 1, 1 << 24, 1<<24 + 1, 1<<31 + 1}
	cos, sin := tensor.New(tensor.F64, 1, 4, 1, 2), tensor.New(tensor.F64, 1, 4, 1, 2)
	rope.Fill(cos, sin, positions, nil)
	for i, p := range positions {
		for j, f := range rope.InvFreq {
			angle := float64(p) * float64(f)
			if p <= 1<<24 {
				angle = float64(float32(angle))
			}
			near(t, "cos", get(cos)[2*i+j], math.Cos(angle), 1e-15)
			near(t, "sin", get(sin)[2*i+j], math.Sin(angle), 1e-15)
		}
	}
}

// The configs of DeepSeek have the trained and the stretched length in place of the factor.
func TestYarnFactorFromLengths(t *testing.T) {
	cfg := hf.Config{HeadDim: 32, RopeTheta: 1e4, MaxPositionEmbedding: 1024,
		RopeScaling: &hf.RopeScaling{Type: "yarn", Factor: 8, OriginalMax: 128}}
	given := NewRope(&cfg)
	cfg.RopeScaling = &hf.RopeScaling{Type: "yarn", OriginalMax: 128}
	if found := NewRope(&cfg); found.Factor != given.Factor || !slices.Equal(found.InvFreq, given.InvFreq) {
		t.Errorf("got %+v, want %+v", found, given)
	}
}

// The goroutines that fill a table together set each row by its own position and length.
func TestRopeOfManyTokens(t *testing.T) {
	const n = 2*ropeChunk + 3
	cfg := &hf.Config{HeadDim: 4, RopeTheta: 100, RopeScaling: &hf.RopeScaling{Type: "longrope", Factor: 1,
		OriginalMax: 4, ShortFactor: []float64{2, 2}, LongFactor: []float64{8, 8}}}
	rope := NewRope(cfg)
	positions, lengths := make([]int, n), make([]int, n)
	for i := range n {
		positions[i], lengths[i] = 7*i%n, 3+i%3
	}
	all, one := [2]View{}, [2]View{}
	for i := range all {
		all[i], one[i] = tensor.New(tensor.F64, 1, n, 1, 2), tensor.New(tensor.F64, 1, 1, 1, 2)
	}
	rope.Fill(all[0], all[1], positions, lengths)
	for i := range n {
		rope.Fill(one[0], one[1], positions[i:i+1], lengths[i:i+1])
		for k := range all {
			if got := get(all[k])[2*i : 2*i+2]; !slices.Equal(got, get(one[k])) {
				t.Fatalf("token %d: %v, want %v", i, got, get(one[k]))
			}
		}
	}
}
