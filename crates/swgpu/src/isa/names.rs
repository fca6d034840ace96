//! The instructions that are emulated, spelt as AMD's "CDNA3 Instruction Set Architecture" spells them, one enumeration per
//! way of executing. Semantics are in [`crate::exec`], in the file that is named beside each enumeration.

/// An enumeration whose variants are mnemonics.
macro_rules! mnemonics {
    ($(#[$meta:meta])* $name:ident: $($op:ident)*) => {
        $(#[$meta])*
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($op),* }

        impl $name {
            /// The variant with this mnemonic (encoding suffix taken off).
            pub fn from_mnemonic(mnemonic: &str) -> Option<Self> {
                match mnemonic { $(stringify!($op) => Some(Self::$op),)* _ => None }
            }

            pub const ALL: &[&str] = &[$(stringify!($op)),*];
        }
    };
}

mnemonics! {
    /// Scalar instructions with a result of 32 or 64 bits (`exec/scalar.rs`).
    ScalarOp:
    s_mov_b32 s_mov_b64 s_movk_i32 s_cmov_b32 s_cmov_b64 s_cmovk_i32 s_not_b32 s_not_b64 s_brev_b32 s_brev_b64 s_abs_i32
    s_bcnt0_i32_b32 s_bcnt0_i32_b64 s_bcnt1_i32_b32 s_bcnt1_i32_b64 s_ff0_i32_b32 s_ff0_i32_b64 s_ff1_i32_b32 s_ff1_i32_b64
    s_flbit_i32_b32 s_flbit_i32_b64 s_flbit_i32 s_sext_i32_i8 s_sext_i32_i16 s_bitset0_b32 s_bitset1_b32 s_getpc_b64
    s_and_saveexec_b64 s_or_saveexec_b64 s_xor_saveexec_b64 s_andn2_saveexec_b64 s_orn2_saveexec_b64 s_andn1_saveexec_b64
    s_add_u32 s_sub_u32 s_add_i32 s_sub_i32 s_addc_u32 s_subb_u32 s_addk_i32 s_mulk_i32 s_mul_i32 s_mul_hi_i32 s_mul_hi_u32
    s_min_i32 s_min_u32 s_max_i32 s_max_u32 s_absdiff_i32 s_cselect_b32 s_cselect_b64
    s_and_b32 s_and_b64 s_or_b32 s_or_b64 s_xor_b32 s_xor_b64 s_andn2_b32 s_andn2_b64 s_orn2_b32 s_orn2_b64
    s_nand_b32 s_nand_b64 s_nor_b32 s_nor_b64 s_xnor_b32 s_xnor_b64 s_lshl_b32 s_lshl_b64 s_lshr_b32 s_lshr_b64
    s_ashr_i32 s_ashr_i64 s_bfm_b32 s_bfm_b64 s_bfe_u32 s_bfe_i32 s_bfe_u64 s_bfe_i64 s_lshl1_add_u32 s_lshl2_add_u32
    s_lshl3_add_u32 s_lshl4_add_u32 s_pack_ll_b32_b16 s_pack_lh_b32_b16 s_pack_hh_b32_b16
}

mnemonics! {
    /// Scalar comparisons, whose only result is SCC (`exec/scalar.rs`).
    ScalarCompare:
    s_cmp_eq_i32 s_cmp_lg_i32 s_cmp_gt_i32 s_cmp_ge_i32 s_cmp_lt_i32 s_cmp_le_i32 s_cmp_eq_u32 s_cmp_lg_u32 s_cmp_gt_u32
    s_cmp_ge_u32 s_cmp_lt_u32 s_cmp_le_u32 s_cmp_eq_u64 s_cmp_lg_u64 s_cmpk_eq_i32 s_cmpk_lg_i32 s_cmpk_gt_i32 s_cmpk_ge_i32
    s_cmpk_lt_i32 s_cmpk_le_i32 s_cmpk_eq_u32 s_cmpk_lg_u32 s_cmpk_gt_u32 s_cmpk_ge_u32 s_cmpk_lt_u32 s_cmpk_le_u32
    s_bitcmp0_b32 s_bitcmp1_b32 s_bitcmp0_b64 s_bitcmp1_b64
}

mnemonics! {
    /// Vector instructions: up to three 32-bit sources, one 32-bit result (`exec/float.rs`, `exec/integer.rs`).
    NarrowOp:
    v_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32
    v_add_f32 v_sub_f32 v_subrev_f32 v_mul_f32 v_mul_legacy_f32 v_fma_f32 v_fmac_f32 v_fmaak_f32 v_fmamk_f32 v_mad_f32
    v_max_f32 v_min_f32 v_max3_f32 v_min3_f32 v_med3_f32 v_rcp_f32 v_rcp_iflag_f32 v_rsq_f32 v_sqrt_f32 v_exp_f32 v_log_f32
    v_sin_f32 v_cos_f32 v_ldexp_f32 v_rndne_f32 v_trunc_f32 v_floor_f32 v_ceil_f32 v_fract_f32 v_frexp_mant_f32
    v_frexp_exp_i32_f32 v_cvt_f32_i32 v_cvt_f32_u32 v_cvt_i32_f32 v_cvt_u32_f32 v_cvt_rpi_i32_f32 v_cvt_flr_i32_f32
    v_cvt_f32_ubyte0 v_cvt_f32_ubyte1 v_cvt_f32_ubyte2 v_cvt_f32_ubyte3 v_cvt_f32_f16 v_cvt_f16_f32 v_cvt_pkrtz_f16_f32
    v_div_fixup_f32
    v_add_u32 v_sub_u32 v_subrev_u32 v_add_i32 v_sub_i32 v_add3_u32 v_lshl_add_u32 v_add_lshl_u32 v_lshl_or_b32 v_and_or_b32
    v_or3_b32 v_xad_u32 v_and_b32 v_or_b32 v_xor_b32 v_xnor_b32 v_not_b32 v_lshlrev_b32 v_lshrrev_b32 v_ashrrev_i32 v_bfe_u32
    v_bfe_i32 v_bfi_b32 v_bfm_b32 v_bfrev_b32 v_bcnt_u32_b32 v_ffbh_u32 v_ffbh_i32 v_ffbl_b32 v_perm_b32 v_alignbit_b32
    v_alignbyte_b32 v_mul_lo_u32 v_mul_hi_u32 v_mul_hi_i32 v_mul_u32_u24 v_mul_i32_i24 v_mul_hi_u32_u24 v_mul_hi_i32_i24
    v_mad_u32_u24 v_mad_i32_i24 v_min_i32 v_max_i32 v_min_u32 v_max_u32 v_min3_i32 v_max3_i32 v_med3_i32 v_min3_u32 v_max3_u32
    v_med3_u32 v_mbcnt_lo_u32_b32 v_mbcnt_hi_u32_b32 v_sad_u32
    v_add_u16 v_sub_u16 v_subrev_u16 v_mul_lo_u16 v_lshlrev_b16 v_lshrrev_b16 v_ashrrev_i16 v_max_u16 v_min_u16 v_max_i16
    v_min_i16 v_mad_u16 v_mad_legacy_u16
}

mnemonics! {
    /// Vector instructions with a 64-bit result or a 64-bit source (`exec/wide.rs`).
    WideOp:
    v_mov_b64 v_lshl_add_u64 v_lshlrev_b64 v_lshrrev_b64 v_ashrrev_i64 v_add_f64 v_mul_f64 v_fma_f64 v_fmac_f64 v_max_f64
    v_min_f64 v_cvt_f64_f32 v_cvt_f64_i32 v_cvt_f64_u32 v_rcp_f64 v_rsq_f64 v_sqrt_f64 v_trunc_f64 v_floor_f64 v_ceil_f64
    v_rndne_f64 v_ldexp_f64 v_div_fixup_f64
    v_cvt_f32_f64 v_cvt_i32_f64 v_cvt_u32_f64
}

mnemonics! {
    /// Pairs of 32-bit values in neighbouring registers (`exec/packed.rs`).
    PackedOp: v_pk_fma_f32 v_pk_mul_f32 v_pk_add_f32 v_pk_mov_b32
}

mnemonics! {
    /// Additions and subtractions with carry-out, and the others that also write a mask (`exec/carry.rs`).
    CarryOp:
    v_add_co_u32 v_sub_co_u32 v_subrev_co_u32 v_addc_co_u32 v_subb_co_u32 v_subbrev_co_u32 v_mad_u64_u32 v_mad_i64_i32
    v_div_scale_f32 v_div_scale_f64
}

mnemonics! {
    /// Matrix products (`exec/matrix.rs`).
    MatrixOp:
    v_mfma_f32_16x16x16_bf16 v_mfma_f32_32x32x8_bf16 v_mfma_f32_16x16x4_f32 v_mfma_f32_32x32x2_f32
}

mnemonics! {
    /// Atomic updates of memory; the same names serve global memory, flat addresses and LDS (`exec/atomic.rs`).
    AtomicOp:
    add sub smin smax umin umax and or xor swap cmpswap inc dec add_f32 add_f64 pk_add_bf16 add_x2 sub_x2 smin_x2 smax_x2
    umin_x2 umax_x2 and_x2 or_x2 xor_x2 swap_x2 cmpswap_x2 min_f32 max_f32
}

impl AtomicOp {
    /// Bytes of memory that one lane updates.
    pub fn bytes(self) -> usize {
        use AtomicOp::*;
        match self {
            add_f64 | add_x2 | sub_x2 | smin_x2 | smax_x2 | umin_x2 | umax_x2 | and_x2 | or_x2 | xor_x2 | swap_x2
            | cmpswap_x2 => 8,
            _ => 4,
        }
    }

    /// Whether the data operand holds a new value followed by the value to compare with.
    pub fn compares(self) -> bool {
        matches!(self, AtomicOp::cmpswap | AtomicOp::cmpswap_x2)
    }
}
