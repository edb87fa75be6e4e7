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
			RopeScaling     hf.RopeScaling `json:"rope_scaling"`
			AttentionFactor float64        `json:"attention_factor"`
			InvFreq         []float64      `json:"inv_freq"`
			Cos, Sin        [][]float64
		}
	}
	readJSON(t, "testdata/rope.json", &oracle)
	if len(oracle.Cases) == 0 {
		t.Fatal("no cases")
	}
	for name, want := range oracle.Cases {
		t.Run(name, func(t *testing.T) {
			rope := NewRope(&hf.Config{
				HeadDim: want.HeadDim, RopeTheta: want.RopeTheta, MaxPositionEmbedding: want.Longest,
				RopeScaling: &want.RopeScaling,
			})
			near(t, "attention factor", rope.Factor, want.AttentionFactor, 1e-8)
			if len(rope.InvFreq) != len(want.InvFreq) {
				t.Fatalf("%d frequencies, want %d", len(rope.InvFreq), len(want.InvFreq))
			}
			for i, f := range want.InvFreq {
				// The power of torch may differ in the last bit, and so may each of the following roundings.
				near(t, "frequency", float64(rope.InvFreq[i]), f, f*4e-7)
			}

			n := len(oracle.Positions)
			cos, sin := tensor.New(tensor.F32, 1, n, 1, want.HeadDim/2), tensor.New(tensor.F32, 1, n, 1, want.HeadDim/2)
			rope.Fill(cos, sin, oracle.Positions, nil)
			c, s := get(cos), get(sin)
			for j, p := range oracle.Positions {
				for i, f := range want.InvFreq {
					// This is the effect of the last bits of the frequency and of the angle.
					angle := float64(p) * math.Abs(f)
					tolerance := 2e-7 + 4e-7*angle
					if rope.InvFreq[i] == float32(f) {
						tolerance = 3e-7
					}
					k := j*want.HeadDim/2 + i
					near(t, "cos", c[k], want.Cos[j][i], tolerance)
					near(t, "sin", s[k], want.Sin[j][i], tolerance)
				}
			}
		})
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
