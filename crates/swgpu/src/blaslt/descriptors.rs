//! Descriptors of a product and of its matrices, and their attributes by AMD's numbers.

use std::ffi::c_void;

use super::{Element, Failure, INVALID_VALUE, NOT_SUPPORTED, failure};

#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub element: Element,
    pub rows: u64,
    pub columns: u64,
    /// Elements from one column to the next.
    pub leading: i64,
    pub batches: i32,
    /// Elements from one matrix of the batch to the next.
    pub stride: i64,
}

impl Layout {
    /// Bytes from the first element to behind the last one of all batches.
    pub fn extent_bytes(&self) -> usize {
        let one = (self.columns.max(1) - 1) * self.leading as u64 + self.rows;
        (one as usize + (self.batches.max(1) - 1) as usize * self.stride as usize) * self.element.bytes()
    }

    pub fn check(&self, name: &str) -> Result<(), Failure> {
        if self.rows == 0 || self.columns == 0 || self.leading < self.rows as i64 || self.batches < 1 || self.stride < 0 {
            return failure(
                INVALID_VALUE,
                format!("matrix {name}: {self:?}; the leading dimension is at least the number of rows"),
            );
        }
        Ok(())
    }

    pub fn set(&mut self, attribute: i32, value: &Value) -> Result<(), Failure> {
        match attribute {
            0 => self.batches = value.int()?,
            1 => self.stride = value.long()?,
            2 => self.element = Element::from_hip(value.int()?)?,
            3 if value.int()? == 0 => {}
            3 => return failure(NOT_SUPPORTED, "only column-major order is served"),
            4 => self.rows = value.long()? as u64,
            5 => self.columns = value.long()? as u64,
            6 => self.leading = value.long()?,
            other => return failure(NOT_SUPPORTED, format!("layout attribute {other}")),
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Product {
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub bias: bool,
    pub bias_pointer: u64,
    pub bias_element: Option<Element>,
    /// Whether alpha and beta are in device memory.
    pub device_scalars: bool,
}

impl Product {
    pub fn set(&mut self, attribute: i32, value: &Value) -> Result<(), Failure> {
        let transpose = || match value.int()? {
            111 => Ok(false),
            112 => Ok(true),
            other => failure(INVALID_VALUE, format!("{other} is no operation; 111 (N) and 112 (T) are")),
        };
        match attribute {
            0 => self.transpose_a = transpose()?,
            1 => self.transpose_b = transpose()?,
            2 => {
                self.bias = match value.int()? {
                    1 => false,
                    4 => true,
                    other => return failure(NOT_SUPPORTED, format!("epilogue {other}; none (1) and bias (4) are served")),
                }
            }
            3 => self.bias_pointer = value.long()? as u64,
            4 => self.bias_element = Some(Element::from_hip(value.int()?)?),
            13 => {
                self.device_scalars = match value.int()? {
                    0 => false,
                    1 => true,
                    other => return failure(NOT_SUPPORTED, format!("pointer mode {other}")),
                }
            }
            other => return failure(NOT_SUPPORTED, format!("attribute {other} of a product")),
        }
        Ok(())
    }
}

/// The bytes that a caller passes for an attribute.
pub struct Value(Vec<u8>);

impl Value {
    /// # Safety
    /// `pointer` is null or points to `bytes` bytes.
    pub unsafe fn new(pointer: *const c_void, bytes: usize) -> Result<Self, Failure> {
        if pointer.is_null() || bytes > 64 {
            return failure(INVALID_VALUE, format!("{bytes} bytes at {pointer:?} for an attribute"));
        }
        // SAFETY: not null, and by this function's contract.
        Ok(Self(unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), bytes) }.to_vec()))
    }

    pub fn int(&self) -> Result<i32, Failure> {
        let bytes = self.0.as_slice().try_into();
        bytes.map(i32::from_le_bytes).or_else(|_| failure(INVALID_VALUE, format!("{} bytes for an attribute of 4", self.0.len())))
    }

    pub fn long(&self) -> Result<i64, Failure> {
        let bytes = self.0.as_slice().try_into();
        bytes.map(i64::from_le_bytes).or_else(|_| failure(INVALID_VALUE, format!("{} bytes for an attribute of 8", self.0.len())))
    }
}
